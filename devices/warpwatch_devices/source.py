"""Defines the interfaces of sources and of the sinks that they publish to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.samples import Attribution, DeviceSample, HostSample, SourceHealth


class DeviceSink(Protocol):
    """Where devices are published. Every method may be called from any thread."""

    def publish_device(self, sample: DeviceSample) -> None: ...

    def forget_device(self, uuid: str, source: str = "nvml") -> None:
        """End the series of a device that was removed cleanly, such as a MIG device."""

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Add to a counter of the agent's own (catalogue scope ``agent``)."""


class Sink(DeviceSink, Protocol):
    """Where sources put what they read."""

    def publish_host(self, sample: HostSample) -> None: ...

    def publish_processes(self, sample: HostSample) -> None: ...

    def publish_attribution(self, attribution: Attribution) -> None: ...

    def publish_health(self, health: SourceHealth) -> None: ...


class Source(Protocol):
    """A source of samples. ``start`` returns at once; loops of the supervisor do the work."""

    name: str

    def start(self, supervisor: LoopRunner, sink: Sink) -> None: ...

    def close(self) -> None:
        """Release resources after the loops have ended; most sources hold none."""
        return None


@dataclass(frozen=True, slots=True)
class SourceContext:
    """The state of the daemon that sources may use.

    ``load_of`` returns the ranks' load on the device of an index, 0 to 1, or None if it has none.
    ``devices`` returns the newest samples. ``counters_wanted``: a capture needs the hardware
    counters now. ``fail`` ends the daemon with exit status 3 and this line, if only a restart
    helps.
    """

    load_of: Callable[[int], float | None]
    devices: Callable[[], tuple[DeviceSample, ...]]
    counters_wanted: Callable[[], bool]
    fail: Callable[[str], None]
