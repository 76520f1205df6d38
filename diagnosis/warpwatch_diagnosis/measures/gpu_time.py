"""Measures the GPU's time as unions of its events over the step window.

Definitions: W the window, B any GPU event, C kernels other than collectives, N collective kernels,
M copies and memsets. busy = |B|/W, idle = 1 - busy, compute = |C|/W, communication = |N|/W, exposed
communication = |N less C|/W, overlap = |N ∩ C|/|N| (Holistic Trace Analysis), memory copy = |M|/W.

A process may drive several devices. A union over them would hide one that idles behind the others,
so the numbers are those of one device: of those in use the one that idles most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from warpwatch_diagnosis.measures.collectives import Collective, collectives
from warpwatch_diagnosis.measures.copies import CopyTime, copy_kind, copy_times
from warpwatch_diagnosis.measures.gpu_events import GpuEvents, device_of
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
from warpwatch_diagnosis.measures.runtime_calls import BlockingCall, Launches, launches
from warpwatch_diagnosis.trace.events import RuntimeCalls, TraceEvent, inside, spans

# Copies over the bus, not those inside the device.
TRANSFERS = ("HtoD", "DtoH")
# Busy for less than this share of the busiest, a device is not in use. A process that sets up
# its context on device 0 by mistake leaves a copy or two there.
MIN_BUSY_SHARE = 0.01


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """One device of the process; ``name`` is its index, ``in_use`` by MIN_BUSY_SHARE."""

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

    devices: all devices with an event in the window, busiest first. transfers: the part of
    ``copies`` between host and device. idle_time: ``idle`` by cause. kernel_times, class_times,
    copy_times: longest first. sizes: the kernels that the steps launched, by name and grid.
    streams: busiest first.
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
        """The share of the communication that compute hides; None if there is none."""
        spent = total(self.communication)
        hidden = total(intersection(self.communication, self.compute))
        return hidden / spent if spent else None


def gpu_time(
    work: GpuEvents, host: HostTime, waits: Sequence[BlockingCall], running: Intervals
) -> GpuTime | None:
    """Measure the device that idles most; None if the window has no GPU events.

    ``waits``, and ``running``, the union of operators, are those of the threads that train or
    launch.
    """
    window, launched = work.window, work.events
    devices = _devices(inside(work.events, window), window)
    if not devices:
        return None
    idlest = min((d for d in devices if d.in_use), key=lambda d: (d.busy_ratio, d.name)).name
    work = work.of_device(idlest) if len(devices) > 1 else work
    events, kernels = inside(work.events, window), inside(work.kernels, window)
    copies, busy = inside(work.copies, window), _union(events, window)
    collective = {k.name for k in work.kernels if classify(k.name) == "communication"}
    compute = _union([k for k in kernels if k.name not in collective], window)
    communication = _union([k for k in kernels if k.name in collective], window)
    by_name, by_class = kernel_times(kernels, window)
    return GpuTime(
        device=idlest,
        devices=devices,
        busy=busy,
        idle=difference([window], busy),
        compute=compute,
        communication=communication,
        copies=_union(copies, window),
        transfers=_union([c for c in copies if copy_kind(c.name)[0] in TRANSFERS], window),
        kernels=_summary(kernels, work.calls),
        idle_time=idle_time(work, launched, host, waits, running),
        launches=launches(events, work.calls, window),
        kernel_times=by_name,
        class_times=by_class,
        copy_times=copy_times(copies, union(compute + communication), window),
        sizes=size_times(work),
        collectives=collectives(work, collective),
        streams=_streams(events, window),
    )


def _devices(events: list[TraceEvent], window: Interval) -> tuple[DeviceUse, ...]:
    """Return the devices, busiest first."""
    found: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        found[device_of(event)].append(event)
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


def _streams(events: list[TraceEvent], window: Interval) -> tuple[StreamUse, ...]:
    found: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        found[event.thread].append(event)
    streams = [StreamUse(name, len(on), total(_union(on, window))) for name, on in found.items()]
    return tuple(sorted(streams, key=lambda s: (-s.busy_us, s.name)))


def _union(events: Sequence[TraceEvent], window: Interval) -> Intervals:
    """Return the union of events that are sorted by begin."""
    return merge(clip(spans(events), window))


def _summary(kernels: list[TraceEvent], calls: RuntimeCalls) -> KernelSummary:
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
