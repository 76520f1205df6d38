"""Where the GPU's time went: unions of its events over the step window.

Definitions: W the window, B any GPU event, C kernels that are no collective, N collective
kernels, M copies and memsets, D iteration of a DataLoader. busy = |B|/W, idle = 1 - busy,
compute = |C|/W, communication = |N|/W, exposed communication = |N \\ C|/W,
overlap = |N ∩ C|/|N| (Holistic Trace Analysis), memory copy = |M|/W.

A process may drive several devices. A union over them would hide one that idles behind the others,
so the numbers are those of one device: of those in use the one that idles most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from warpwatch_diagnosis.measures.collectives import Collective, collectives, exchanges
from warpwatch_diagnosis.measures.copies import CopyTime, copy_kind, copy_times
from warpwatch_diagnosis.measures.host_events import HostTime
from warpwatch_diagnosis.measures.idle import IdleTime, idle_time
from warpwatch_diagnosis.measures.intervals import (
    Interval,
    Intervals,
    clip,
    difference,
    intersection,
    merge,
    total,
    union,
)
from warpwatch_diagnosis.measures.kernels import (
    SHORT_KERNEL_US,
    ClassTime,
    KernelTime,
    Size,
    SizeTime,
    classify,
    kernel_times,
    size_times,
)
from warpwatch_diagnosis.measures.runtime_calls import (
    BlockingCall,
    Launches,
    by_correlation,
    launches,
)
from warpwatch_diagnosis.trace.events import TraceEvent, by_begin, inside, spans
from warpwatch_diagnosis.trace.reader import Trace

# Copies over the bus, not those inside the device.
TRANSFERS = ("HtoD", "DtoH")
# Busy for less than this share of the busiest, a device is not in use: a process that sets up
# its context on device 0 by mistake leaves a copy or two there.
MIN_BUSY_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class GpuEvents:
    """A trace's kernels and copies by their begin, together in ``events``, the runtime calls by
    correlation, and the host's all-to-alls."""

    kernels: Sequence[TraceEvent]
    copies: Sequence[TraceEvent]
    events: Sequence[TraceEvent]
    calls: Mapping[int | None, TraceEvent]
    exchanges: Sequence[TraceEvent]

    @classmethod
    def of(cls, trace: Trace) -> GpuEvents:
        kernels, copies = trace.events["kernel"], trace.events["copy"]
        return cls(
            kernels=by_begin(kernels, _order),
            copies=by_begin(copies, _order),
            events=by_begin(kernels + copies, _order),
            calls=by_correlation(trace.events["runtime"]),
            exchanges=exchanges(trace.events["annotation"] + trace.events["operator"]),
        )

    @property
    def threads(self) -> set[str]:
        """Those that launch."""
        calls = self.calls
        return {call.thread for e in self.events if (call := calls.get(e.correlation))}

    def of_device(self, name: str) -> GpuEvents:
        return replace(
            self,
            kernels=[e for e in self.kernels if _device(e) == name],
            copies=[e for e in self.copies if _device(e) == name],
            events=[e for e in self.events if _device(e) == name],
        )


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device of the process, ``name``: its index. in_use: for more than MIN_BUSY_SHARE."""

    name: str
    count: int
    busy_ratio: float
    in_use: bool


@dataclass(frozen=True, slots=True)
class StreamUse:
    """One stream of a device, ``process/stream`` in the trace. ``busy_us``: union in the window."""

    name: str
    count: int
    busy_us: float


@dataclass(frozen=True, slots=True)
class KernelSummary:
    """Counts and medians of the kernels in the window; times in µs."""

    count: int
    short_share: float
    median_us: float
    median_launch_us: float


@dataclass(frozen=True, slots=True)
class GpuTime:
    """Unions of time in µs, clipped to the window, of the device ``device``.

    devices: all that have an event in the window, busiest first.
    transfers: copies between host and device, a part of ``copies``.
    idle_time: ``idle`` split into causes. kernel_times, class_times, copy_times: longest first.
    sizes: what the steps launched, by name and grid. launches: how the host feeds the device.
    collectives: in order. streams: busiest first.
    """

    device: str
    devices: tuple[DeviceUse, ...]
    busy: Intervals
    idle: Intervals
    compute: Intervals
    communication: Intervals
    copies: Intervals
    transfers: Intervals
    kernels: KernelSummary
    idle_time: IdleTime
    launches: Launches
    kernel_times: tuple[KernelTime, ...]
    class_times: tuple[ClassTime, ...]
    copy_times: tuple[CopyTime, ...]
    sizes: Mapping[Size, SizeTime]
    collectives: tuple[Collective, ...]
    streams: tuple[StreamUse, ...]

    @property
    def devices_in_use(self) -> int:
        return sum(device.in_use for device in self.devices)

    @property
    def exposed_communication(self) -> Intervals:
        return difference(self.communication, self.compute)

    @property
    def exposed_copies(self) -> Intervals:
        return difference(difference(self.busy, self.compute), self.exposed_communication)

    @property
    def exposed_transfers(self) -> Intervals:
        """Copies between host and device while the device does nothing else."""
        return difference(self.transfers, union(self.compute + self.communication))

    @property
    def overlap_ratio(self) -> float | None:
        """Share of the communication that compute hides; None where there is none."""
        spent = total(self.communication)
        hidden = total(intersection(self.communication, self.compute))
        return hidden / spent if spent else None


def gpu_time(
    work: GpuEvents,
    window: Interval,
    host: HostTime,
    waits: Sequence[BlockingCall],
    running: Intervals,
) -> GpuTime | None:
    """None without GPU events in the window. Of the threads that train or launch: ``waits``, and
    ``running``, the union of their operators."""
    devices = _devices(inside(work.events, window), window)
    if not devices:
        return None
    judged, launched = _idlest(devices), work.events
    work = work.of_device(judged) if len(devices) > 1 else work
    calls = work.calls
    events, kernels = inside(work.events, window), inside(work.kernels, window)
    copies, busy = inside(work.copies, window), _union(events, window)
    collective = {k.name for k in work.kernels if classify(k.name) == "communication"}
    compute = _union([k for k in kernels if k.name not in collective], window)
    communication = _union([k for k in kernels if k.name in collective], window)
    by_name, by_class = kernel_times(kernels, window)
    return GpuTime(
        device=judged,
        devices=devices,
        busy=busy,
        idle=difference([window], busy),
        compute=compute,
        communication=communication,
        copies=_union(copies, window),
        transfers=_union([c for c in copies if copy_kind(c.name)[0] in TRANSFERS], window),
        kernels=_summary(kernels, calls),
        idle_time=idle_time(work.events, launched, calls, window, host, waits, running),
        launches=launches(events, calls, window),
        kernel_times=by_name,
        class_times=by_class,
        copy_times=copy_times(copies, union(compute + communication), window),
        sizes=size_times(work.kernels, calls, window),
        collectives=collectives(
            [k for k in work.kernels if k.name in collective], calls, window, work.exchanges
        ),
        streams=_streams(events, window),
    )


def _order(event: TraceEvent) -> tuple[float, int, str, str]:
    """Of events that begin at one instant."""
    return event.end_us, event.correlation or -1, event.thread, event.name


def _device(event: TraceEvent) -> str:
    """Index of the device: an argument of the event, else its process id."""
    index = event.whole("device")
    return event.thread.partition("/")[0] if index is None else str(index)


def _devices(events: list[TraceEvent], window: Interval) -> tuple[DeviceUse, ...]:
    """Busiest first."""
    found: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        found[_device(event)].append(event)
    busy_us = {name: total(_union(mine, window)) for name, mine in found.items()}
    window_us = window[1] - window[0]
    least_us = MIN_BUSY_SHARE * max(busy_us.values(), default=0.0)
    return tuple(
        DeviceUse(
            name=name,
            count=len(found[name]),
            busy_ratio=min(1.0, busy_us[name] / window_us) if window_us else 0.0,
            in_use=busy_us[name] >= least_us,
        )
        for name in sorted(found, key=lambda name: (-busy_us[name], name))
    )


def _idlest(devices: Sequence[DeviceUse]) -> str:
    return min((d for d in devices if d.in_use), key=lambda d: (d.busy_ratio, d.name)).name


def _streams(events: list[TraceEvent], window: Interval) -> tuple[StreamUse, ...]:
    found: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        found[event.thread].append(event)
    streams = [StreamUse(name, len(on), total(_union(on, window))) for name, on in found.items()]
    return tuple(sorted(streams, key=lambda s: (-s.busy_us, s.name)))


def _union(events: Sequence[TraceEvent], window: Interval) -> Intervals:
    """``events``: by their begin."""
    return merge(clip(spans(events), window))


def _summary(kernels: list[TraceEvent], calls: Mapping[int | None, TraceEvent]) -> KernelSummary:
    durations = [kernel.end_us - kernel.begin_us for kernel in kernels]
    # A graph's launch counts once, however many kernels it starts.
    launched = {kernel.correlation for kernel in kernels} & calls.keys()
    launch_us = [calls[key].end_us - calls[key].begin_us for key in launched]
    return KernelSummary(
        count=len(kernels),
        short_share=sum(us < SHORT_KERNEL_US for us in durations) / (len(kernels) or 1),
        median_us=median(durations) if durations else 0.0,
        median_launch_us=median(launch_us) if launch_us else 0.0,
    )
