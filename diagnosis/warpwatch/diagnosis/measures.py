"""The numbers of one trace, from which the rules conclude and which the reports show."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from warpwatch.diagnosis.cpu_time import CpuTime, busiest_thread, cpu_time
from warpwatch.diagnosis.gpu_time import GpuTime, gpu_time
from warpwatch.diagnosis.intervals import Interval, Intervals, clip, total, union
from warpwatch.diagnosis.reader import Event, Trace

_STEP = re.compile(r"ProfilerStep#?\s*(\d+)")
_GPU_RATIOS = (
    "gpu_busy_ratio",
    "idle_ratio",
    "compute_ratio",
    "communication_ratio",
    "exposed_communication_ratio",
    "overlap_ratio",
    "memory_copy_ratio",
)
LOADER_PREFIX = "enumerate(DataLoader)"
# stop() in the middle of a step leaves a last annotation of some µs.
RUNT_STEP_SHARE = 0.01
MIN_STEPS = 2
# What a trace without step annotations must hold to be judged at all.
MIN_EVENTS_WITHOUT_STEPS = 100


@dataclass(frozen=True, slots=True)
class Measures:
    """One trace's window and times. ``gpu`` is None for a CPU-only trace, then ``cpu`` is there.

    steps: begin and end of each step in µs; empty where the trace has no step annotations.
    loading: union of the DataLoader's iteration; loader: its events in the window.
    launches: calls that launch a kernel, to notice GPU events that were not recorded.
    """

    file: str
    rank: int | None
    device_name: str | None
    window: Interval
    steps: tuple[Interval, ...]
    loading: Intervals
    loader: tuple[Event, ...]
    launches: int
    gpu: GpuTime | None
    cpu: CpuTime | None

    @property
    def window_us(self) -> float:
        return self.window[1] - self.window[0]

    @property
    def window_s(self) -> float:
        return self.window_us / 1e6

    @property
    def label(self) -> str:
        return self.file if self.rank is None else f"rank {self.rank}"

    def share(self, intervals: Intervals) -> float:
        """Of the window, 0 to 1."""
        return min(1.0, total(intervals) / self.window_us) if self.window_us else 0.0

    @property
    def shortage(self) -> str | None:
        """Why this trace holds too little to conclude anything, in a clause; None if enough."""
        if self.gpu is None and self.launches:
            return f"{self.launches} kernels were launched but no GPU event was recorded"
        if self.steps and len(self.steps) < MIN_STEPS:
            return f"only {len(self.steps)} step was recorded, at least {MIN_STEPS} are needed"
        events = self.gpu.kernels.count if self.gpu else self.cpu.operators_count if self.cpu else 0
        if not events:
            return "there is no kernel and no operator of the training thread in the window"
        if not self.steps and events < MIN_EVENTS_WITHOUT_STEPS:
            return f"no step is annotated and there are only {events} kernels or operators"
        return None

    def to_json(self) -> dict[str, Any]:
        """One entry of ``traces``; ratios of the window, None where they do not apply."""
        return {
            "file": self.file,
            "rank": self.rank,
            "device_name": self.device_name,
            "steps": len(self.steps),
            "window_s": round(self.window_s, 6),
            "time": self._gpu_ratios() | {"data_loading_ratio": self._ratio(self.loading)},
            "cpu": self._cpu_ratios(),
        }

    def _ratio(self, intervals: Intervals) -> float:
        return round(self.share(intervals), 4)

    def _gpu_ratios(self) -> dict[str, float | None]:
        gpu = self.gpu
        if gpu is None:
            return dict.fromkeys(_GPU_RATIOS)
        overlap = gpu.overlap_ratio
        values = (
            self._ratio(gpu.busy),
            self._ratio(gpu.idle),
            self._ratio(gpu.compute),
            self._ratio(gpu.communication),
            self._ratio(gpu.exposed_communication),
            None if overlap is None else round(overlap, 4),
            self._ratio(gpu.copies),
        )
        return dict(zip(_GPU_RATIOS, values, strict=True))

    def _cpu_ratios(self) -> dict[str, float | None] | None:
        if self.cpu is None:
            return None
        return {
            "operator_ratio": self._ratio(self.cpu.operators),
            "dispatch_ratio": self._ratio(self.cpu.dispatch),
            "collective_wait_ratio": self._ratio(self.cpu.waiting),
            "host_ratio": self._ratio(self.cpu.host),
        }


def measure(trace: Trace) -> Measures:
    """Pure; the order of the trace's events does not matter."""
    step_events = _steps(trace)
    window = _window(trace, step_events)
    loader = [
        e
        for e in trace.named(LOADER_PREFIX)
        if e.begin_us < window[1] and e.end_us > window[0] and "__next__" in e.name
    ]
    loading = union(clip(((e.begin_us, e.end_us) for e in loader), window))
    threads = {e.thread for e in step_events} or busiest_thread(trace)
    gpu = gpu_time(trace, window)
    launches = sum("LaunchKernel" in e.name for e in trace.events["runtime"])
    return Measures(
        file=trace.file,
        rank=trace.rank,
        device_name=trace.device_name,
        window=window,
        steps=tuple((e.begin_us, e.end_us) for e in step_events),
        loading=loading,
        loader=tuple(sorted(loader, key=lambda e: (e.begin_us, e.end_us))),
        launches=launches,
        gpu=gpu,
        cpu=cpu_time(trace, window, loading, threads) if gpu is None else None,
    )


def _steps(trace: Trace) -> list[Event]:
    """The ProfilerStep annotations in order, each name once, without a runt at the end."""
    longest: dict[str, Event] = {}
    for event in trace.named("ProfilerStep"):
        known = longest.get(event.name)
        if _STEP.match(event.name) and (known is None or _size(event) > _size(known)):
            longest[event.name] = event
    steps = sorted(longest.values(), key=lambda e: (e.begin_us, e.end_us))
    if len(steps) > 1:
        usual = max(e.end_us - e.begin_us for e in steps)
        if steps[-1].end_us - steps[-1].begin_us < RUNT_STEP_SHARE * usual:
            steps.pop()
    return steps


def _size(event: Event) -> tuple[float, float, str]:
    """Among copies of a step on several threads the choice must not depend on their order."""
    return event.end_us - event.begin_us, -event.begin_us, event.thread


def _window(trace: Trace, steps: list[Event]) -> Interval:
    """All steps; else the span of the GPU's events; else that of everything."""
    gpu = trace.events["kernel"] + trace.events["copy"]
    chosen = steps or gpu or [e for kept in trace.events.values() for e in kept]
    return min(e.begin_us for e in chosen), max(e.end_us for e in chosen)
