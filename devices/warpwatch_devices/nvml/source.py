"""NVIDIA GPUs through NVML: a loop a device, so that one that fails costs no other anything.

The manager's loop keeps the library initialised. The watchdog's loop calls nothing of NVML: it
speaks for devices whose call does not return, and for those that were there and are not any more.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from warpwatch_devices.config import NvmlConfig
from warpwatch_devices.nvml.device import NvmlDevice
from warpwatch_devices.nvml.generation import Generation
from warpwatch_devices.nvml.last_resort import LastResort
from warpwatch_devices.nvml.library import (
    NvmlUnavailable,
    VersionMismatch,
    count_devices,
    initialise,
    shut_down,
)
from warpwatch_devices.source import Sink, Surroundings
from warpwatch_devices.xid_ledger import XidLedger
from warpwatch_runtime.supervisor import LoopHandle, LoopRunner
from warpwatch_telemetry.samples import Device, DeviceSample, SourceHealth

logger = logging.getLogger(__name__)

# How long to wait before NVML is initialised again.
RETRY_INTERVAL_S = 5.0

# How long the end of the process waits for calls; the supervisor has waited before.
CLOSE_TIMEOUT_S = 0.5

# What only a restart mends.
_UPGRADED = (
    "the NVIDIA driver was upgraded under this process: kernel module and library differ; "
    "restarting picks the new library up"
)
_BLOCKED = (
    "a stuck driver call prevents NVML from being restarted in this process; "
    "restarting the daemon helps"
)
_UNREADABLE = (
    "no GPU can be read any more: every call fails without a known reason; the container lost its "
    "devices, as when systemd reloads on the host; restarting it helps"
)


class NvmlSource:
    """Starts without a driver and comes up by itself when there is one."""

    name = "nvml"

    def __init__(
        self,
        config: NvmlConfig,
        surroundings: Surroundings,
        ledger: XidLedger,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic, self._wall = monotonic, wall
        self._config = config
        self._surroundings = surroundings
        self._ledger = ledger
        self._retry_at = 0.0
        self._reason = ""
        self._errors = 0
        self._mismatched = False
        self._last_resort = LastResort(surroundings.fail, config.mismatch_grace_s, monotonic)
        self._generation: Generation | None = None
        # Ended ones with a call inside NVML still: each holds its initialisation.
        self._left: list[Generation] = []
        # Every device that was seen, with the UUID of its GPU.
        self._known: dict[str, tuple[Device, str]] = {}

    def start(self, supervisor: LoopRunner, sink: Sink) -> None:
        interval_s = self._config.interval_s
        manager = supervisor.every(
            "nvml", min(1.0, interval_s), lambda: self._manage(supervisor, sink)
        )
        supervisor.every("nvml-watchdog", min(0.5, interval_s), lambda: self._watch(manager, sink))

    def close(self) -> None:
        """Leave NVML, unless a call is still in it: the process's end does that then."""
        generation, self._generation = self._generation, None
        if generation is not None:
            generation.end(CLOSE_TIMEOUT_S)
            self._left.append(generation)
        self._release()

    def _manage(self, supervisor: LoopRunner, sink: Sink) -> None:
        if self._generation is not None and self._generation.gone:
            self._leave(sink)
        self._release()
        if self._generation is None and self._monotonic() >= self._retry_at:
            self._try(supervisor, sink)
        if self._generation is not None:
            self._generation.drain(sink)
        self._last_resort.consider(self._ailment())
        sink.publish_health(self._health())

    def _leave(self, sink: Sink) -> None:
        generation, self._generation = self._generation, None
        assert generation is not None
        # The watchdog may not have looked since a device was read first.
        self._remember(generation.devices)
        generation.drain(sink)
        self._errors += generation.errors + 1
        self._unavailable("the driver went away")
        generation.end(self._config.stuck_after_s)
        self._left.append(generation)

    def _release(self) -> None:
        """Shut NVML down as often as it was initialised for generations that are over.

        Never under a call. NVML counts, and only what follows its last user's shutdown is a real
        initialisation, so one such call keeps all later generations from a driver that is new.
        """
        for generation in tuple(self._left):
            if not generation.in_flight:
                self._left.remove(generation)
                shut_down()
                # A driver that was left for another version's sake is not waited for.
                self._retry_at = self._monotonic()

    def _try(self, supervisor: LoopRunner, sink: Sink) -> None:
        try:
            self._generation = self._begin(supervisor, sink)
            self._reason = ""
            self._mismatched = False
        except VersionMismatch as mismatch:
            self._mismatched = True
            grace_s = self._config.mismatch_grace_s
            self._unavailable(f"{mismatch}; the daemon ends after {grace_s:g} s of it")
        except NvmlUnavailable as unavailable:
            self._mismatched = False
            self._unavailable(f"{unavailable}; {_BLOCKED}" if self._left else str(unavailable))

    def _begin(self, supervisor: LoopRunner, sink: Sink) -> Generation:
        initialise()
        try:
            count = count_devices()
        except NvmlUnavailable:
            shut_down()
            raise
        generation = Generation(
            *(supervisor, sink, self._ledger, self._config), self._monotonic, self._wall
        )
        generation.begin(count)
        return generation

    def _ailment(self) -> str:
        """What is wrong that only a restart mends, if it lasts; empty: nothing."""
        if self._mismatched:
            return _UPGRADED
        generation = self._generation
        if self._left and (generation is None or not generation.works):
            return _BLOCKED
        return _UNREADABLE if self._unreadable() else ""

    def _unreadable(self) -> bool:
        """Whether no device can be read where one could."""
        return self._generation is not None and self._generation.unreadable and bool(self._known)

    def _unavailable(self, reason: str) -> None:
        if reason != self._reason:
            logger.warning("no NVML: %s", reason)
        self._reason = reason
        self._retry_at = self._monotonic() + RETRY_INTERVAL_S

    def _health(self) -> SourceHealth:
        generation = self._generation
        if generation is None:
            return SourceHealth(self.name, False, self._reason, errors=self._errors)
        errors = self._errors + generation.errors
        if self._unreadable():
            return SourceHealth(self.name, False, _UNREADABLE, generation.slowest_s, errors)
        reason = generation.trouble if generation.loops else "the driver has no device"
        return SourceHealth(self.name, True, reason, generation.slowest_s, errors)

    def _watch(self, manager: LoopHandle, sink: Sink) -> None:
        if manager.busy_s > self._config.stuck_after_s:
            reason = "NVML does not answer"
            sink.publish_health(SourceHealth(self.name, False, reason, errors=self._errors))
        generation = self._generation
        if generation is not None:
            generation.watch()
        self._speak_for_missing(generation, sink)

    def _remember(self, gpus: tuple[NvmlDevice, ...]) -> set[str]:
        """Note which devices there are; returns their UUIDs."""
        there = {
            device.uuid: (device, gpu.device.uuid)
            for gpu in gpus
            if gpu.known
            for device in gpu.devices
        }
        self._known.update(there)
        return set(there)

    def _speak_for_missing(self, generation: Generation | None, sink: Sink) -> None:
        """Who was there and is not any more is down, but a MIG device of a GPU that is there:
        that one was taken down in order."""
        gpus = generation.devices if generation else ()
        present = self._remember(gpus)
        settled = {gpu.device.uuid for gpu in gpus if gpu.settled}
        # While devices are still being opened, any of them may be the one that is missing.
        complete = generation and all(gpu.known or gpu.reason for gpu in gpus)
        reason = "lost" if complete else "driver"
        for uuid, (device, gpu_uuid) in tuple(self._known.items()):
            if uuid in present:
                continue
            if gpu_uuid in settled:
                del self._known[uuid]
                sink.forget_device(uuid)
                continue
            values = self._ledger.values(uuid)
            gone = DeviceSample(device, self._wall(), values, up=False, reason=reason)
            sink.publish_device(gone)
