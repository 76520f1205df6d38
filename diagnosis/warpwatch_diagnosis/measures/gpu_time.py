"""Measures the GPU's time as unions of its events over the step window, and lists its collectives.

Definitions: W the window, B any GPU event, C kernels other than collectives, N collective kernels,
M copies and memsets. busy = |B|/W, idle = 1 - busy, compute = |C|/W, communication = |N|/W, exposed
communication = |N less C|/W, overlap = |N ∩ C|/|N| (Holistic Trace Analysis), memory copy = |M|/W.

A process may drive several devices. A union over them would hide one that idles behind the others,
so the numbers are those of one device: of those in use the one that idles most.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from warpwatch_diagnosis.intervals import (
    Interval,
    Intervals,
    clip,
    difference,
    intersection,
    merge,
    total,
    union,
)
from warpwatch_diagnosis.measures.gpu_work import (
    SHORT_KERNEL_US,
    ClassTime,
    CopyTime,
    GpuWork,
    KernelTime,
    Size,
    SizeTime,
    classify,
    copy_kind,
    copy_times,
    device_of,
    kernel_times,
    size_times,
)
from warpwatch_diagnosis.measures.host_events import HostTime
from warpwatch_diagnosis.measures.idle import IdleTime, idle_time
from warpwatch_diagnosis.measures.operators import item_bytes
from warpwatch_diagnosis.measures.runtime_calls import BlockingCall, Launches, launches
from warpwatch_diagnosis.trace.events import (
    THREAD,
    RuntimeCalls,
    TraceEvent,
    grouped,
    inside,
    spans,
)

# A capture of a few steps has fewer; the limit bounds what a hostile trace can store.
MAX_COLLECTIVES = 50_000
_MAX_NAME = 200
# An all-to-all of NCCL is a kernel of sends and receives, too.
_SEND_RECEIVE = re.compile("SendRecv", re.IGNORECASE)
# At most this many host events of all-to-alls lie around one launch or in other threads.
MAX_NESTED = 16


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective kernel that began or was launched in the window; µs of this rank's clock.

    name: the collective (``allreduce``), else the kernel. is_named: the trace or the kernel's own
    name has the collective. launched_us: begin of the launch call. bytes: the larger of input and
    output of this rank. Fields are None if the trace does not have them.
    """

    name: str
    begin_us: float
    end_us: float
    launched_us: float | None
    process_group: str | None
    sequence: int | None
    bytes: int | None
    group_size: int | None
    is_named: bool = True


def collectives(work: GpuWork, names: set[str]) -> tuple[Collective, ...]:
    """Return the kernels of these names that begin or are launched in the window, in order.

    A host that is ahead launches in the window what its device begins later; a peer that is less
    late may begin it in time.
    """
    low, high = work.window
    found = [(k, work.calls.get(k.correlation)) for k in work.kernels if k.name in names]
    mine = [
        (kernel, call)
        for kernel, call in found
        if low <= kernel.begin_us < high or (call is not None and low <= call.begin_us < high)
    ]
    mine.sort(key=lambda pair: (pair[0].begin_us, pair[0].end_us, pair[0].thread))
    return tuple(_collective(*pair, work.exchanges) for pair in mine[:MAX_COLLECTIVES])


def _collective(
    kernel: TraceEvent, call: TraceEvent | None, exchanges: Sequence[TraceEvent]
) -> Collective:
    given = kernel.arguments or {}
    name, group = given.get("Collective name"), given.get("Process Group Name")
    if not isinstance(name, str) or not name:
        sends = _SEND_RECEIVE.search(kernel.name) is not None
        name = "all_to_all" if sends and _is_within(call, exchanges) else ""
    is_named = bool(name) or _SEND_RECEIVE.search(kernel.name) is None
    return Collective(
        is_named=is_named,
        name=(name or kernel.name)[:_MAX_NAME],
        begin_us=kernel.begin_us,
        end_us=kernel.end_us,
        launched_us=call.begin_us if call is not None else None,
        process_group=str(group)[:_MAX_NAME] if isinstance(group, str | int) else None,
        sequence=kernel.whole("Seq"),
        bytes=_bytes(kernel),
        group_size=kernel.whole("Group size"),
    )


def _is_within(call: TraceEvent | None, exchanges: Sequence[TraceEvent]) -> bool:
    """Return whether one of the host's all-to-alls launches it, in the same thread."""
    if call is None:
        return False
    last = bisect_right(exchanges, call.begin_us, key=attrgetter("begin_us"))
    return any(
        event.thread == call.thread and call.begin_us < event.end_us
        for event in exchanges[max(0, last - MAX_NESTED) : last]
    )


def _bytes(kernel: TraceEvent) -> int | None:
    elements = [n for key in ("In msg nelems", "Out msg nelems") if (n := kernel.whole(key))]
    item = item_bytes((kernel.arguments or {}).get("dtype"))
    return max(elements) * item if elements and item else None


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
    work: GpuWork, host: HostTime, waits: Sequence[BlockingCall], running: Intervals
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
    found = grouped(events, device_of)
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
    found = grouped(events, THREAD).items()
    streams = [StreamUse(name, len(on), total(_union(on, window))) for name, on in found]
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
