"""The numbers of one trace, from which the rules conclude and which the reports show."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from warpwatch_diagnosis.measures.cpu_time import CpuTime, busiest_thread, cpu_time, reads
from warpwatch_diagnosis.measures.gpu_time import GpuTime, Work, gpu_time
from warpwatch_diagnosis.measures.host_events import LOADER_PREFIX, HostTime, host_time
from warpwatch_diagnosis.measures.intervals import Interval, Intervals, total, union
from warpwatch_diagnosis.measures.launches import by_correlation
from warpwatch_diagnosis.measures.lines import Line, lines
from warpwatch_diagnosis.measures.measures_json import details
from warpwatch_diagnosis.measures.memory_timeline import MemoryTimeline, memory_timelines
from warpwatch_diagnosis.measures.operators import Operators, operators
from warpwatch_diagnosis.measures.places import Instant, of_instants
from warpwatch_diagnosis.measures.roofline import Roofline, roofline
from warpwatch_diagnosis.measures.step_timeline import StepTimeline, longest_step
from warpwatch_diagnosis.measures.steps import StepTime, step_times
from warpwatch_diagnosis.measures.synchronization import (
    Synchronization,
    Wait,
    synchronization,
    waits,
)
from warpwatch_diagnosis.trace.reader import Event, Trace

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
# stop() in the middle of a step leaves a last annotation of some µs.
RUNT_STEP_SHARE = 0.01
MIN_STEPS = 2
# What a trace without step annotations must hold to be judged at all.
MIN_EVENTS_WITHOUT_STEPS = 100


@dataclass(frozen=True, slots=True)
class Measures:
    """One trace's window and times. ``gpu`` is None for a CPU-only trace, then ``cpu`` is there.

    world_size, job: None where the trace does not tell.
    steps: begin and end of each step in µs; empty where the trace has no step annotations.
    loading: union of the DataLoader's iteration, on another thread where it is waited for (see
    host_events); loader: its events in the window.
    launches: calls that launch a kernel, to notice GPU events that were not recorded.
    host: what the host did besides operators. operators: the longest ones. synchronization: who
    waited for the device, or on a CPU-only trace read values as if there were one. memory: by
    device, empty without profile_memory. roofline: None without a GPU. per_step: as ``steps``.
    timeline: the longest step, to be drawn.
    lines: of the user's code in loading, gc, compile, checkpoint and the host's own time (with a
    GPU: while it idles for it); empty without stacks. derived: what rules have computed from these.
    """

    file: str
    rank: int | None
    world_size: int | None
    job: str | None
    device_name: str | None
    window: Interval
    steps: tuple[Interval, ...]
    loading: Intervals
    loader: tuple[Event, ...]
    launches: int
    gpu: GpuTime | None
    cpu: CpuTime | None
    host: HostTime
    operators: Operators
    synchronization: Synchronization
    memory: tuple[MemoryTimeline, ...]
    roofline: Roofline | None
    per_step: tuple[StepTime, ...]
    timeline: StepTimeline | None
    lines: Mapping[str, tuple[Line, ...]]
    derived: dict[object, Intervals] = field(default_factory=dict, compare=False, repr=False)

    @property
    def window_us(self) -> float:
        return self.window[1] - self.window[0]

    @property
    def window_s(self) -> float:
        return self.window_us / 1e6

    @property
    def label(self) -> str:
        whose = self.file if self.rank is None else f"rank {self.rank}"
        several = self.gpu is not None and self.gpu.devices_in_use > 1
        return f"{whose}, GPU {self.gpu.device}" if several and self.gpu else whose

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
            **details(self),
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
            "compile_ratio": self._ratio(self.cpu.compile),
            "gc_ratio": self._ratio(self.cpu.gc),
            "checkpoint_ratio": self._ratio(self.cpu.checkpoint),
        }


def measure(trace: Trace) -> Measures:
    """Pure; the order of the trace's events does not matter."""
    step_events = _steps(trace)
    window = _window(trace, step_events)
    steps = tuple((e.begin_us, e.end_us) for e in step_events)
    training = {e.thread for e in step_events} or busiest_thread(trace)
    work = Work.of(trace)
    threads = training | work.threads
    host = host_time(trace, window, threads)
    loading, loader = host.loading.intervals, _loader(trace, window, threads)
    waited = _waits(trace, work, window, threads)
    found = _operators(trace, work, window, waited)
    places = _places(trace, waited, found)
    running = union(span for thread in threads for span in found.running.get(thread, []))
    gpu = gpu_time(work, window, host, waited, running)
    cpu = cpu_time(trace, window, loading, training, host) if gpu is None else None
    per_step = step_times([_number(e) for e in step_events], steps, loading, gpu)
    return Measures(
        file=trace.file,
        rank=trace.rank,
        world_size=trace.world_size,
        job=trace.job,
        device_name=trace.device_name,
        window=window,
        steps=steps,
        loading=loading,
        loader=tuple(sorted(loader, key=lambda e: (e.begin_us, e.end_us, e.thread, e.name))),
        launches=sum("LaunchKernel" in e.name for e in trace.events["runtime"]),
        gpu=gpu,
        cpu=cpu,
        host=host,
        operators=found.with_places(places),
        synchronization=synchronization(waited, steps, found.owners, places),
        memory=memory_timelines(trace.events["memory"], window),
        roofline=_roofline(trace.device_name, window, found, gpu),
        per_step=per_step,
        timeline=longest_step(per_step, work.events, host, running, gpu),
        lines=lines(trace.events["python"], training, _parts(host, gpu, cpu)),
    )


def _parts(host: HostTime, gpu: GpuTime | None, cpu: CpuTime | None) -> dict[str, Intervals]:
    """What is worth a line of the user's code."""
    own = gpu.idle_time.by_cause["host"] if gpu else cpu.host if cpu else []
    return {
        "loading": host.loading.intervals,
        "gc": host.gc.intervals,
        "compile": host.compile.intervals,
        "checkpoint": host.checkpoint.intervals,
        "host": own,
    }


def _loader(trace: Trace, window: Interval, threads: set[str]) -> list[Event]:
    found = [
        e
        for e in trace.events["annotation"]
        if e.name.startswith(LOADER_PREFIX)
        and "__next__" in e.name
        and e.begin_us < window[1]
        and e.end_us > window[0]
    ]
    return [e for e in found if e.thread in threads] or found


def _waits(trace: Trace, work: Work, window: Interval, threads: set[str]) -> list[Wait]:
    """What waits for the device; without one, what would."""
    if not work.events:
        return reads(trace.events["operator"], window, threads)
    copies = by_correlation(work.copies)
    return [w for w in waits(trace.events["runtime"], copies, window) if w.thread in threads]


def _operators(trace: Trace, work: Work, window: Interval, waited: list[Wait]) -> Operators:
    launched: dict[str, dict[float, float]] = defaultdict(dict)
    calls = work.calls
    for _, begin_us, end_us, _, correlation, _ in work.events:
        call = calls.get(correlation)
        if call is not None:
            mine, at_us = launched[call.thread], call.begin_us
            mine[at_us] = mine.get(at_us, 0.0) + end_us - begin_us
    instants = {(wait.thread, wait.begin_us) for wait in waited}
    return operators(trace.events["operator"], window, launched, instants)


def _places(trace: Trace, waited: list[Wait], found: Operators) -> dict[Instant, str]:
    """Lines of the user's code of the waits and of the longest operators."""
    instants = {(wait.thread, wait.begin_us) for wait in waited} | found.longest
    return of_instants(trace.events["python"], instants) | dict(found.owner_places)


def _roofline(
    device_name: str | None, window: Interval, found: Operators, gpu: GpuTime | None
) -> Roofline | None:
    if gpu is None:
        return None
    window_us = window[1] - window[0]
    return roofline(
        device_name, window_us, found.work, gpu.class_times, gpu.kernel_times, gpu.devices_in_use
    )


def _number(step: Event) -> int:
    match = _STEP.match(step.name)
    return int(match[1][:18]) if match else 0


def _steps(trace: Trace) -> list[Event]:
    """The ProfilerStep annotations in order, each name once, without a runt at the end."""
    longest: dict[str, Event] = {}
    for event in trace.events["annotation"]:
        if _STEP.match(event.name) is None:
            continue
        known = longest.get(event.name)
        if known is None or _size(event) > _size(known):
            longest[event.name] = event
    steps = sorted(longest.values(), key=lambda e: (e.begin_us, e.end_us, _number(e), e.name))
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
