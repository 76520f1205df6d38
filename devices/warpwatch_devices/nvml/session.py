"""Runs the loops of all devices from one initialisation of NVML to the next.

A search finds devices that come, go or change their index while NVML is up, in a thread that is
replaced if it hangs. A thread whose call does not return may outlive ``end``: it publishes nothing
and starts nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pynvml

from warpwatch_devices.config import NvmlConfig
from warpwatch_devices.nvml.device import DeviceContext, NvmlDevice
from warpwatch_devices.nvml.events import EventWatcher
from warpwatch_devices.nvml.gpm import GpmWorker
from warpwatch_devices.nvml.library import CallCosts, LibraryGone, Meaning, code_of, meaning_of
from warpwatch_devices.source import DeviceSink
from warpwatch_devices.xid_ledger import XidLedger
from warpwatch_runtime.call_guard import CallGuard, GuardedLoop
from warpwatch_runtime.supervisor import LoopHandle, LoopRunner
from warpwatch_telemetry.samples import DeviceSample

logger = logging.getLogger(__name__)


class SessionSink:
    """Forwards to ``sink`` until ``close``, so that a call which returns late publishes nothing."""

    def __init__(self, sink: DeviceSink) -> None:
        self._sink = sink
        self._lock = threading.Lock()
        self._closed = False
        self._retired: set[str] = set()

    def close(self) -> None:
        """Close; nothing is published after the return."""
        with self._lock:
            self._closed = True

    def retire(self, uuid: str) -> None:
        """Forget the device, also after ``close``, and ignore its samples."""
        with self._lock:
            self._retired.add(uuid)
            self._sink.forget_device(uuid)

    def welcome(self, uuid: str) -> None:
        """Accept samples of the device again."""
        with self._lock:
            self._retired.discard(uuid)

    def publish_device(self, sample: DeviceSample) -> None:
        with self._lock:
            if not self._closed and sample.device.uuid not in self._retired:
                self._sink.publish_device(sample)

    def forget_device(self, uuid: str, source: str = "nvml") -> None:
        with self._lock:
            if not self._closed:
                self._sink.forget_device(uuid, source)

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        with self._lock:
            if not self._closed:
                self._sink.count(name, *labels, by=by)


SCAN_READER = "scan"
SCAN_INTERVAL_S = 10.0
MAX_REPLACEMENTS = 8


@dataclass(slots=True)
class DeviceListing:
    """The found UUIDs by index.

    ``silent``: indices with an unknown device; ``unasked``: those of them that were skipped.
    """

    index_of: dict[str, int] = field(default_factory=dict)
    silent: set[int] = field(default_factory=set)
    unasked: set[int] = field(default_factory=set)


class Search:
    """The queries of one search thread, which may be given up.

    Every method raises LibraryGone, and CallAbandoned once it was given up.
    """

    def __init__(self, guard: CallGuard, costs: CallCosts, hanging: Callable[[], set[int]]) -> None:
        self._guard = guard
        self._costs = costs
        self._hanging = hanging

    def count(self) -> int | None:
        """Return the number of devices, or None if unknown."""
        count: int | None = self._ask("count", pynvml.nvmlDeviceGetCount)
        return count

    def listing(self, count: int, stuck: Iterable[int]) -> DeviceListing:
        """List the devices except at the indices in ``stuck``, which do not reply."""
        listing = DeviceListing()
        for index in range(count):
            if index in stuck or index in self._hanging():
                listing.unasked.add(index)
                uuid = None
            else:
                uuid = self._identify(index)
            if uuid is None:
                listing.silent.add(index)
            else:
                listing.index_of[uuid] = index
        return listing

    def _identify(self, index: int) -> str | None:
        handle = self._ask(index, pynvml.nvmlDeviceGetHandleByIndex, index)
        if handle is None:
            return None
        uuid: str | None = self._ask(index, pynvml.nvmlDeviceGetUUID, handle)
        return uuid

    def _ask(self, subject: object, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return self._guard.call(subject, self._costs.measure, SCAN_READER, call, *arguments)
        except pynvml.NVMLError as error:
            if meaning_of(code_of(error)) is Meaning.LIBRARY:
                raise LibraryGone from error
            return None


class Scanner:
    """Runs ``look`` with a search every SCAN_INTERVAL_S; hanging indices are skipped."""

    def __init__(
        self,
        supervisor: LoopRunner,
        look: Callable[[Search], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.costs = CallCosts()
        self._loop = GuardedLoop(
            supervisor,
            "nvml-scan",
            SCAN_INTERVAL_S,
            lambda guard: look(Search(guard, self.costs, self._hanging)),
            MAX_REPLACEMENTS,
            monotonic,
        )

    def begin(self) -> None:
        self._loop.begin()

    def watch(self, stuck_after_s: float) -> None:
        """Replace a hanging search. For the watchdog: it never calls NVML."""
        self._loop.give_up_if_stuck(stuck_after_s)
        # A search that hangs outside of an index would hang again.
        elsewhere = not self.hangs or self._hanging()
        if elsewhere:
            self._loop.begin()

    def end(self) -> None:
        self._loop.close(0.0)

    @property
    def hangs(self) -> bool:
        """Whether a search that was given up is still inside NVML."""
        return bool(self._loop.hanging)

    @property
    def in_flight(self) -> bool:
        return self._loop.in_flight

    def _hanging(self) -> set[int]:
        """Return the indices at which a search hangs now."""
        return {subject for subject in self._loop.hanging if isinstance(subject, int)}


# With these reasons a device may have been replaced by another one.
_MAYBE_GONE = ("lost", "driver")

Running = tuple[NvmlDevice, LoopHandle]


class NvmlSession:
    """The devices of one initialisation of NVML, from ``begin`` to ``end``.

    NVML may be shut down once nothing is ``in_flight``.
    """

    def __init__(
        self,
        supervisor: LoopRunner,
        sink: DeviceSink,
        ledger: XidLedger,
        config: NvmlConfig,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._sink = SessionSink(sink)
        self._monotonic = monotonic
        gpm = GpmWorker(supervisor, config.interval_s, config.stuck_after_s, monotonic)
        events = EventWatcher(supervisor, self._sink, ledger, monotonic)
        self.loops: tuple[Running, ...] = ()
        self._context = DeviceContext(self._sink, ledger, events, gpm, monotonic, wall)
        self._supervisor = supervisor
        self._config = config
        self._count = 0
        self._scanner = Scanner(supervisor, self._look, monotonic)
        self._library_gone = False
        # Some devices were matched with indices that were not queried.
        self._guessed = False
        # Guards ``loops`` against a late scanner.
        self._lock = threading.Lock()
        self._closed = False
        self._removed_loops: list[LoopHandle] = []
        # Costs of removed devices, until they are drained.
        self._past_costs: list[CallCosts] = []

    def begin(self, count: int) -> None:
        self._count = count
        self.loops = tuple(self._start(index) for index in range(count))
        self._scanner.begin()
        logger.info("NVML has %d devices", count)

    @property
    def gone(self) -> bool:
        """Whether NVML must be initialised again."""
        return self._library_gone or any(device.library_gone for device, _ in self.loops)

    @property
    def works(self) -> bool:
        """Whether a device is read, or there is none to read."""
        return not self.gone and (not self.loops or any(d.settled for d in self.devices))

    @property
    def unreadable(self) -> bool:
        """Whether every call of every device fails, for no reason that NVML has a name for."""
        devices = self.devices
        return bool(devices) and all(d.reason == "driver" and not d.library_gone for d in devices)

    @property
    def trouble(self) -> str:
        """The faults outside of the devices."""
        troubles = [self._context.events.trouble]
        if self._scanner.hangs:
            troubles.append("the search for devices that come and go does not return")
        return "; ".join(trouble for trouble in troubles if trouble)

    @property
    def devices(self) -> tuple[NvmlDevice, ...]:
        return tuple(device for device, _ in self.loops)

    @property
    def errors(self) -> int:
        return sum(costs.errors for costs in self._all_costs())

    @property
    def slowest_s(self) -> float:
        return max((loop.last_duration_s for _, loop in self.loops), default=0.0)

    @property
    def in_flight(self) -> bool:
        """After ``end``: whether a call is inside NVML still."""
        loops = (*(loop for _, loop in self.loops), *self._removed_loops)
        return (
            any(loop.alive for loop in loops)
            or self._scanner.in_flight
            or self._context.events.in_flight
            or self._context.gpm.in_flight
        )

    def drain(self, sink: DeviceSink) -> None:
        for costs in self._all_costs():
            costs.drain(sink.count)

    def watch(self) -> None:
        """Report the devices whose call does not return. Never calls NVML."""
        for device, loop in self.loops:
            if self._is_stuck(loop):
                device.publish_stuck()
        self._scanner.watch(self._config.stuck_after_s)
        self._context.events.watch(self._config.stuck_after_s)
        self._context.gpm.watch()

    def end(self, timeout_s: float) -> None:
        """Stop the loops, and wait at most ``timeout_s`` for all of them."""
        deadline = self._monotonic() + timeout_s
        with self._lock:
            self._closed = True
        self._sink.close()
        self._scanner.end()
        for _, loop in self.loops:
            loop.stop()
        self._context.events.close()
        self._context.gpm.close()
        for device, loop in self.loops:
            loop.stop(max(0.0, deadline - self._monotonic()))
            self._forget_unknown(device)

    def _all_costs(self) -> tuple[CallCosts, ...]:
        of_devices = (device.costs for device in self.devices)
        return (self._scanner.costs, self._context.gpm.costs, *self._past_costs, *of_devices)

    def _is_stuck(self, loop: LoopHandle) -> bool:
        return loop.busy_s > self._config.stuck_after_s

    def _start(self, index: int) -> Running:
        interval_s = self._config.interval_s
        device = NvmlDevice(index, self._context, interval_s)
        self._sink.welcome(device.device.uuid)
        return device, self._supervisor.every(f"nvml-{index}", interval_s, device.step)

    def _forget_unknown(self, device: NvmlDevice) -> None:
        """Forget an index at which no UUID was ever read."""
        if not device.known:
            self._sink.retire(device.device.uuid)

    def _look(self, search: Search) -> None:
        """Search for changes with one call.

        List the devices if something changed or is missing.
        """
        if self.gone:
            return
        try:
            count = search.count()
            missing = any(device.reason in _MAYBE_GONE for device in self.devices)
            if count is None or not (count != self._count or missing or self._guessed):
                return
            stuck = {device.device.index for device, loop in self.loops if self._is_stuck(loop)}
            listing = search.listing(count, stuck)
        except LibraryGone:
            self._library_gone = True
            return
        with self._lock:
            if not self._closed:
                self._apply(listing, count)

    def _apply(self, listing: DeviceListing, count: int) -> None:
        """Assign the listed indices, remove devices that are gone, and start new ones."""
        changed = count != self._count
        self._count = count
        self._guessed = bool(listing.unasked)
        indices = self._indices(listing)
        kept: list[Running] = []
        for device, loop in self.loops:
            index = indices.get(device)
            if index is None:
                self._remove(device, loop)
                continue
            # A working device is not moved to an index that was not queried.
            guessed = index in listing.unasked
            if not guessed and (changed or index != device.device.index):
                device.move(index)
            kept.append((device, loop))
        for index in sorted(set(range(count)) - set(indices.values())):
            logger.info("a device has come to index %d", index)
            kept.append(self._start(index))
        self.loops = tuple(kept)

    def _indices(self, listing: DeviceListing) -> dict[NvmlDevice, int]:
        """Return the index of each device that still exists.

        A device that was not listed may be at a silent index. The devices that most likely still
        exist stay there, in their previous order, since NVML sorts by the bus.
        """
        named = dict(listing.index_of)
        indices: dict[NvmlDevice, int] = {}
        for device in self.devices:
            index = named.pop(device.device.uuid, None)
            if index is not None:
                indices[device] = index
        left: list[Running] = []
        for device, loop in self.loops:
            index = device.device.index
            if device in indices:
                continue
            if not device.known and index in named.values():
                named = {uuid: at for uuid, at in named.items() if at != index}
                indices[device] = index
            else:
                left.append((device, loop))
        silent = sorted(listing.silent)
        left.sort(key=lambda running: self._doubt(running, listing))
        staying = sorted(left[: len(silent)], key=lambda running: running[0].device.index)
        own = {d: d.device.index for d, _ in staying if d.device.index in listing.silent}
        others = [device for device, _ in staying if device not in own]
        free = sorted(listing.silent - set(own.values()))
        return indices | own | dict(zip(others, free, strict=False))

    def _doubt(self, running: Running, listing: DeviceListing) -> tuple[bool, bool]:
        """Return a sort key that is low if the device surely still exists."""
        device, loop = running
        there = self._is_stuck(loop) or not device.reason
        return not there, device.device.index not in listing.silent

    def _remove(self, device: NvmlDevice, loop: LoopHandle) -> None:
        logger.warning("device %s is not there any more", device.device.uuid)
        loop.stop()
        self._removed_loops = [old for old in self._removed_loops if old.alive] + [loop]
        self._past_costs.append(device.costs)
        self._forget_unknown(device)
        for gone in device.devices:
            self._context.events.forget(gone.uuid)
            self._context.gpm.remove(gone.uuid)
