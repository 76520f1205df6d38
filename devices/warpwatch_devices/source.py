"""What a source is: something that is read again and again and publishes what it read."""

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
        """The device is gone in order (MIG reconfigured): its series end."""

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Add to a counter of the agent's own (catalogue scope ``agent``)."""


class Sink(DeviceSink, Protocol):
    """Where sources put what they read."""

    def publish_host(self, sample: HostSample) -> None: ...

    def publish_processes(self, sample: HostSample) -> None: ...

    def publish_attribution(self, attribution: Attribution) -> None: ...

    def publish_health(self, health: SourceHealth) -> None: ...


class Source(Protocol):
    """``start`` returns at once; the work is done in loops of the supervisor."""

    name: str

    def start(self, supervisor: LoopRunner, sink: Sink) -> None: ...

    def close(self) -> None:
        """Give back what it holds, once its loops have ended; most hold nothing."""
        return None


@dataclass(frozen=True, slots=True)
class SourceContext:
    """What a source may know of the rest of the daemon.

    load_of: how busy the ranks keep the device of an index (0 to 1), None when none uses it.
    devices: the newest sample of every device.
    counters_wanted: whether a capture runs that needs the hardware counters for itself.
    fail: ends the daemon with exit 3 and this one line, where only a restart can help.
    """

    load_of: Callable[[int], float | None]
    devices: Callable[[], tuple[DeviceSample, ...]]
    counters_wanted: Callable[[], bool]
    fail: Callable[[str], None]
