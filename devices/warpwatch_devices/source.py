"""Defines the interfaces of sources, of their sinks, and of the origins of attributions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.samples import Attribution, DeviceSample, HostSample, SourceHealth


class DeviceSink(Protocol):
    """Where devices are published. Every method may be called from any thread."""

    def publish_device(self, sample: DeviceSample) -> None: ...

    def forget_device(self, uuid: str, source: str = "nvml") -> None:
        """End the series of a device that was removed cleanly, such as a MIG device."""


class Sink(DeviceSink, Protocol):
    """Where sources put what they read."""

    def count(self, name: str, *labels: str, by: float = 1.0) -> None:
        """Add to a counter of the agent's own (catalogue scope ``agent``)."""

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


class OriginError(Exception):
    """Raised with one line if an origin cannot be read."""


@dataclass(frozen=True, slots=True)
class OriginAnswer:
    """The reply of an origin; ``refused`` has the invalid parts, in a few words each."""

    attributions: tuple[Attribution, ...] = ()
    refused: frozenset[str] = frozenset()


class AttributionOrigin(Protocol):
    """A source of attributions; ``name`` is the label ``origin`` of its failures.

    With ``needs_devices`` it is queried only once a device is known. The others are queried every
    second: rings of pods wait for their reply.
    """

    name: str
    needs_devices: bool

    def read(self, samples: Iterable[DeviceSample], now: float) -> OriginAnswer:
        """Read the origin at ``now`` (wall clock). Raises OriginError without a reply."""

    def close(self) -> None:
        """Release resources; most origins hold none."""
        return None
