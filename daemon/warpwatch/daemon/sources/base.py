"""What a source is: something that is read again and again and publishes what it read."""

from __future__ import annotations

from typing import Protocol

from warpwatch.daemon.supervisor import Supervisor
from warpwatch.telemetry.samples import DeviceSample, HostSample, SourceHealth


class Sink(Protocol):
    """Where sources put what they read. Every method may be called from any thread."""

    def publish_device(self, sample: DeviceSample) -> None: ...

    def forget_device(self, uuid: str) -> None:
        """The device is gone in order (MIG reconfigured): its series end."""

    def publish_host(self, sample: HostSample) -> None: ...

    def publish_health(self, health: SourceHealth) -> None: ...


class Source(Protocol):
    """``start`` returns at once; the work is done in loops of the supervisor."""

    name: str

    def start(self, supervisor: Supervisor, sink: Sink) -> None: ...

    def close(self) -> None: ...
