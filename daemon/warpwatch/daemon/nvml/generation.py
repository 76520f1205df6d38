"""The devices between one initialisation of NVML and the next, each with a loop of its own.

Devices that come, go or change places while NVML is up are found by a loop of its own too, since
to ask for them may take as long as a device that does not answer.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

import pynvml

from warpwatch.daemon.config import NvmlConfig
from warpwatch.daemon.nvml.costs import CallCosts
from warpwatch.daemon.nvml.device import Companions, NvmlDevice
from warpwatch.daemon.nvml.events import EventWatcher
from warpwatch.daemon.nvml.gpm import GpmWorker
from warpwatch.daemon.nvml.library import LibraryGone, Meaning, code_of, meaning_of
from warpwatch.daemon.sources.base import Sink
from warpwatch.daemon.sources.xid_ledger import XidLedger
from warpwatch.daemon.supervisor import Loop, Supervisor

logger = logging.getLogger(__name__)

# Reasons for which a device that is still there may have been exchanged for another.
_MAYBE_GONE = ("lost", "driver")


@dataclass(slots=True)
class _Inventory:
    """What devices NVML names: UUIDs by index, and the indices at which one does not answer."""

    index_of: dict[str, int] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)


class Generation:
    """``begin`` starts the loops; ``end`` stops them and says whether NVML may be left."""

    def __init__(
        self,
        supervisor: Supervisor,
        sink: Sink,
        ledger: XidLedger,
        config: NvmlConfig,
        probe_interval_s: float,
    ) -> None:
        gpm = None
        if config.gpm:
            gpm = GpmWorker(supervisor, config.interval_s, config.stuck_after_s)
        events = EventWatcher(supervisor, sink, ledger)
        self.loops: tuple[tuple[NvmlDevice, Loop], ...] = ()
        self._companions = Companions(sink, ledger, events, gpm)
        self._supervisor = supervisor
        self._config = config
        self._probe_interval_s = probe_interval_s
        self._count = 0
        self._scanner: Loop | None = None
        self._library_gone = False
        # Of devices that have gone, until they are drained.
        self._costs = CallCosts()
        self._past_costs: list[CallCosts] = []

    def begin(self, count: int) -> None:
        self._count = count
        self.loops = tuple(self._loop(index) for index in range(count))
        self._scanner = self._supervisor.every("nvml-scan", self._probe_interval_s, self._scan)
        logger.info("NVML has %d devices", count)

    @property
    def gone(self) -> bool:
        """Whether NVML must be initialised again."""
        return self._library_gone or any(device.library_gone for device, _ in self.loops)

    @property
    def devices(self) -> tuple[NvmlDevice, ...]:
        return tuple(device for device, _ in self.loops)

    @property
    def errors(self) -> int:
        return sum(costs.errors for costs in self._all_costs())

    @property
    def slowest_s(self) -> float:
        return max((loop.last_duration_s for _, loop in self.loops), default=0.0)

    def drain(self, sink: Sink) -> None:
        for costs in self._all_costs():
            costs.drain(sink.count)

    def watch(self) -> None:
        """Speak for the devices whose call does not return. Never calls NVML."""
        for device, loop in self.loops:
            if loop.busy_s > self._config.stuck_after_s:
                device.publish_stuck()
        self._companions.events.watch(self._config.stuck_after_s)
        if self._companions.gpm is not None:
            self._companions.gpm.watch()

    def end(self) -> bool:
        """Stop the loops; whether none of them is inside a call that does not return."""
        loops = [loop for _, loop in self.loops]
        if self._scanner is not None:
            loops.append(self._scanner)
        for loop in loops:
            loop.stop()
        self._companions.events.close()
        in_flight = [self._companions.events.in_flight]
        if self._companions.gpm is not None:
            self._companions.gpm.close()
            in_flight.append(self._companions.gpm.in_flight)
        stuck = [loop.busy_s > self._config.stuck_after_s for loop in loops]
        return not any(in_flight + stuck)

    def _all_costs(self) -> tuple[CallCosts, ...]:
        gpm = self._companions.gpm
        of_gpm = () if gpm is None else (gpm.costs,)
        of_devices = (device.costs for device in self.devices)
        return (self._costs, *of_gpm, *self._past_costs, *of_devices)

    def _loop(self, index: int) -> tuple[NvmlDevice, Loop]:
        interval_s = self._config.interval_s
        device = NvmlDevice(index, self._companions, interval_s, self._probe_interval_s)
        return device, self._supervisor.every(f"nvml-{index}", interval_s, device.step)

    def _scan(self) -> None:
        """One call, unless something has changed or is missing."""
        if self.gone:
            return
        try:
            count = self._ask(lambda _: pynvml.nvmlDeviceGetCount(), None)
            missing = any(device.reason in _MAYBE_GONE for device in self.devices)
            if count is not None and (count != self._count or missing):
                self._apply(self._take_inventory(count), count)
        except LibraryGone:
            self._library_gone = True

    def _ask(self, call: Any, argument: Any) -> Any:
        """The answer, None where there is none. Raises LibraryGone."""
        try:
            return self._costs.measure("scan", call, argument)
        except pynvml.NVMLError as error:
            if meaning_of(code_of(error)) is Meaning.LIBRARY:
                raise LibraryGone from error
            return None

    def _take_inventory(self, count: int) -> _Inventory:
        inventory = _Inventory()
        stuck = {
            device.device.index
            for device, loop in self.loops
            if loop.busy_s > self._config.stuck_after_s
        }
        for index in range(count):
            # One that does not return would not return here either.
            uuid = None if index in stuck and count == self._count else self._identify(index)
            if uuid is None:
                inventory.silent.add(index)
            else:
                inventory.index_of[uuid] = index
        return inventory

    def _identify(self, index: int) -> str | None:
        handle = self._ask(pynvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            return None
        uuid: str | None = self._ask(pynvml.nvmlDeviceGetUUID, handle)
        return uuid

    def _apply(self, inventory: _Inventory, count: int) -> None:
        """Devices are where NVML says; who is not named any more goes, who is new comes."""
        changed = count != self._count
        self._count = count
        kept: list[tuple[NvmlDevice, Loop]] = []
        for device, loop in self.loops:
            index = inventory.index_of.pop(device.device.uuid, None)
            if index is None:
                index = self._place_of_silent(device, inventory)
            if index is None:
                self._remove(device, loop)
                continue
            if changed or index != device.device.index:
                device.move(index)
            kept.append((device, loop))
        for index in (*inventory.index_of.values(), *inventory.silent):
            logger.info("a device has come to index %d", index)
            kept.append(self._loop(index))
        self.loops = tuple(kept)

    def _place_of_silent(self, device: NvmlDevice, inventory: _Inventory) -> int | None:
        """The index of a device that does not answer, or has never told its UUID; None: gone."""
        index = device.device.index
        if index in inventory.silent:
            inventory.silent.remove(index)
            return index
        if not device.known and index in inventory.index_of.values():
            inventory.index_of = {u: i for u, i in inventory.index_of.items() if i != index}
            return index
        return None

    def _remove(self, device: NvmlDevice, loop: Loop) -> None:
        logger.warning("device %s is not there any more", device.device.uuid)
        loop.stop()
        self._past_costs.append(device.costs)
        for gone in device.devices:
            self._companions.events.forget(gone.uuid)
            if self._companions.gpm is not None:
                self._companions.gpm.remove(gone.uuid)
