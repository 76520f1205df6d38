"""NVIDIA GPUs through NVML: a loop a device, so that one that fails costs nobody else anything.

The manager's loop keeps the library initialised. The watchdog's loop calls nothing of NVML: it
speaks for devices whose call does not return, and for those that were there and are not any more.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

import pynvml

from warpwatch.daemon.config import NvmlConfig
from warpwatch.daemon.sources.base import Sink
from warpwatch.daemon.sources.nvml_device import PROBE_INTERVAL_S, NvmlDevice
from warpwatch.daemon.sources.nvml_library import NvmlUnavailable, initialise, shut_down
from warpwatch.daemon.supervisor import Loop, Supervisor
from warpwatch.telemetry.samples import Device, DeviceSample, SourceHealth

logger = logging.getLogger(__name__)

# How long to wait before NVML is initialised again.
RETRY_INTERVAL_S = 5.0


@dataclass(slots=True)
class _Generation:
    """The devices and their loops between one initialisation of NVML and the next."""

    loops: list[tuple[NvmlDevice, Loop]] = field(default_factory=list)

    @property
    def gone(self) -> bool:
        return any(device.library_gone for device, _ in self.loops)

    def stop(self) -> None:
        for _, loop in self.loops:
            loop.stop()


class NvmlSource:
    """Starts without a driver and comes up by itself when there is one."""

    name = "nvml"

    def __init__(
        self,
        config: NvmlConfig,
        retry_interval_s: float = RETRY_INTERVAL_S,
        probe_interval_s: float = PROBE_INTERVAL_S,
    ) -> None:
        self._config = config
        self._retry_interval_s = retry_interval_s
        self._probe_interval_s = probe_interval_s
        self._retry_at = 0.0
        self._reason = ""
        self._errors = 0
        self._generation: _Generation | None = None
        self._known: dict[str, Device] = {}

    def start(self, supervisor: Supervisor, sink: Sink) -> None:
        interval_s = self._config.interval_s
        manager = supervisor.every(
            "nvml", min(1.0, interval_s), lambda: self._manage(supervisor, sink)
        )
        supervisor.every("nvml-watchdog", min(0.5, interval_s), lambda: self._watch(manager, sink))

    def close(self) -> None:
        """Leave NVML, unless a call is still in it: the process's end does that then."""
        generation, self._generation = self._generation, None
        if generation is not None:
            self._leave(generation)

    def _manage(self, supervisor: Supervisor, sink: Sink) -> None:
        if self._generation is not None and self._generation.gone:
            self._errors += 1
            self._unavailable("the driver went away")
            generation, self._generation = self._generation, None
            self._leave(generation)
        if self._generation is None and time.monotonic() >= self._retry_at:
            try:
                self._generation = self._begin(supervisor, sink)
                self._reason = ""
            except NvmlUnavailable as unavailable:
                self._unavailable(str(unavailable))
        sink.publish_health(self._health())

    def _unavailable(self, reason: str) -> None:
        if reason != self._reason:
            logger.warning("no NVML: %s", reason)
        self._reason = reason
        self._retry_at = time.monotonic() + self._retry_interval_s

    def _begin(self, supervisor: Supervisor, sink: Sink) -> _Generation:
        initialise()
        try:
            count = pynvml.nvmlDeviceGetCount()
        except pynvml.NVMLError as error:
            shut_down()
            raise NvmlUnavailable(f"NVML does not count devices: {error}") from error
        generation = _Generation()
        for index in range(count):
            device = NvmlDevice(index, sink, self._config.interval_s, self._probe_interval_s)
            loop = supervisor.every(f"nvml-{index}", self._config.interval_s, device.step)
            generation.loops.append((device, loop))
        logger.info("NVML has %d devices", count)
        return generation

    def _leave(self, generation: _Generation) -> None:
        generation.stop()
        if not any(loop.busy_s > self._config.stuck_after_s for _, loop in generation.loops):
            shut_down()

    def _health(self) -> SourceHealth:
        generation = self._generation
        if generation is None:
            return SourceHealth(self.name, False, self._reason, errors=self._errors)
        slowest_s = max((loop.last_duration_s for _, loop in generation.loops), default=0.0)
        errors = self._errors + sum(device.errors for device, _ in generation.loops)
        reason = "" if generation.loops else "the driver has no device"
        return SourceHealth(self.name, True, reason, slowest_s, errors)

    def _watch(self, manager: Loop, sink: Sink) -> None:
        if manager.busy_s > self._config.stuck_after_s:
            reason = "NVML does not answer"
            sink.publish_health(SourceHealth(self.name, False, reason, errors=self._errors))
        generation = self._generation
        present: set[str] = set()
        for device, loop in generation.loops if generation else ():
            present.add(device.device.uuid)
            if loop.busy_s > self._config.stuck_after_s:
                device.publish_stuck()
            if device.device.name:
                self._known[device.device.uuid] = device.device
        reason = "lost" if generation else "driver"
        for uuid, known in self._known.items():
            if uuid not in present:
                gone = DeviceSample(known, time.time(), up=False, reason=reason)
                sink.publish_device(gone)
