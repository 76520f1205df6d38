"""Where the GPU's time went: unions of its events over the step window.

Definitions: W the window, B any GPU event, C kernels that are no collective, N collective
kernels, M copies and memsets, D iteration of a DataLoader. busy = |B|/W, idle = 1 - busy,
compute = |C|/W, communication = |N|/W, exposed communication = |N \\ C|/W,
overlap = |N ∩ C|/|N| (Holistic Trace Analysis), memory copy = |M|/W.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from statistics import median

from warpwatch.diagnosis.intervals import (
    Interval,
    Intervals,
    clip,
    difference,
    intersection,
    total,
    union,
)
from warpwatch.diagnosis.reader import Event, Trace

# NCCL, RCCL (whose kernels are named ncclDevKernel_*), oneCCL, HCCL.
_COLLECTIVE_KERNEL = re.compile(r"nccl|rccl|oneccl|hccl", re.IGNORECASE)
# Copies over the bus, not those inside the device.
_TRANSFER = re.compile(r"HtoD|DtoH|HostToDevice|DeviceToHost", re.IGNORECASE)
# A kernel shorter than this does less work than its launch (TraceLens).
SHORT_KERNEL_US = 10.0


@dataclass(frozen=True, slots=True)
class Kernels:
    """Counts and medians of the kernels in the window; times in µs."""

    count: int
    short_share: float
    median_us: float
    median_launch_us: float


@dataclass(frozen=True, slots=True)
class GpuTime:
    """Unions of time in µs, clipped to the window.

    transfers: copies between host and device, a part of ``copies``.
    host_wait: idle time before work that the host launched only after the idle time had begun.
    unexplained: idle time before work whose launch is not in the trace.
    """

    busy: Intervals
    idle: Intervals
    compute: Intervals
    communication: Intervals
    copies: Intervals
    transfers: Intervals
    host_wait: Intervals
    unexplained: Intervals
    kernels: Kernels

    @property
    def exposed_communication(self) -> Intervals:
        return difference(self.communication, self.compute)

    @property
    def exposed_transfers(self) -> Intervals:
        """Copies between host and device while the device does nothing else."""
        return difference(self.transfers, union(self.compute + self.communication))

    @property
    def overlap_ratio(self) -> float | None:
        """Share of the communication that compute hides; None where there is none."""
        spent = total(self.communication)
        if not spent:
            return None
        return total(intersection(self.communication, self.compute)) / spent


def gpu_time(trace: Trace, window: Interval) -> GpuTime | None:
    """None for a trace without GPU events in the window."""
    kernels = _within(trace.events["kernel"], window)
    copies = _within(trace.events["copy"], window)
    if not kernels and not copies:
        return None
    launches: dict[int | None, Event] = {
        e.correlation: e for e in trace.events["runtime"] if e.correlation is not None
    }
    busy = _union(kernels + copies, window)
    host_wait, unexplained = _why_idle(kernels + copies, launches, window)
    return GpuTime(
        busy=busy,
        idle=difference([window], busy),
        compute=_union([k for k in kernels if not is_collective(k)], window),
        communication=_union([k for k in kernels if is_collective(k)], window),
        copies=_union(copies, window),
        transfers=_union([c for c in copies if _TRANSFER.search(c.name)], window),
        host_wait=host_wait,
        unexplained=unexplained,
        kernels=_kernels(kernels, launches),
    )


def is_collective(kernel: Event) -> bool:
    return _COLLECTIVE_KERNEL.search(kernel.name) is not None


def _within(events: list[Event], window: Interval) -> list[Event]:
    return [e for e in events if e.begin_us < window[1] and e.end_us > window[0]]


def _union(events: list[Event], window: Interval) -> Intervals:
    return union(clip(((e.begin_us, e.end_us) for e in events), window))


def _why_idle(
    events: list[Event], launches: dict[int | None, Event], window: Interval
) -> tuple[Intervals, Intervals]:
    """Host wait as HTA defines it, but for the whole device instead of stream by stream."""
    host_wait: Intervals = []
    unexplained: Intervals = []
    end_us = window[0]
    for event in sorted(events, key=lambda e: e.begin_us):
        if event.begin_us > end_us:
            launch = launches.get(event.correlation)
            if launch is None:
                unexplained.append((end_us, event.begin_us))
            elif launch.end_us > end_us:
                host_wait.append((end_us, event.begin_us))
        end_us = max(end_us, event.end_us)
    if end_us < window[1]:
        host_wait.append((end_us, window[1]))
    return host_wait, unexplained


def _kernels(kernels: list[Event], launches: dict[int | None, Event]) -> Kernels:
    durations = [k.end_us - k.begin_us for k in kernels]
    calls = [launches[k.correlation] for k in kernels if k.correlation in launches]
    short = sum(duration < SHORT_KERNEL_US for duration in durations)
    return Kernels(
        count=len(kernels),
        short_share=short / len(kernels) if kernels else 0.0,
        median_us=median(durations) if durations else 0.0,
        median_launch_us=median(c.end_us - c.begin_us for c in calls) if calls else 0.0,
    )
