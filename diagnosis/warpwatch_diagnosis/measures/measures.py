"""The numbers of one trace, from which the rules conclude and which the reports show."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from warpwatch_diagnosis.measures.code_lines import CodeLine, event_name, longest_lines
from warpwatch_diagnosis.measures.cpu_time import CpuTime, cpu_time
from warpwatch_diagnosis.measures.gpu_time import GpuEvents, GpuTime, gpu_time
from warpwatch_diagnosis.measures.host_events import LOADING, HostTime, host_time
from warpwatch_diagnosis.measures.intervals import Interval, Intervals, total, union
from warpwatch_diagnosis.measures.operators import Operators, operators
from warpwatch_diagnosis.measures.replay import savings
from warpwatch_diagnosis.measures.roofline import Roofline, roofline
from warpwatch_diagnosis.measures.runtime_calls import (
    BlockingCall,
    Synchronization,
    by_correlation,
    reads,
    synchronization,
    waits,
)
from warpwatch_diagnosis.measures.steps import StepTime, StepTimeline, longest_step, step_times
from warpwatch_diagnosis.trace.events import TraceEvent, inside, spans
from warpwatch_diagnosis.trace.reader import Trace

# c10::DeviceType of what has no memory of its own.
_CPU_TYPE = 0


@dataclass(frozen=True, slots=True)
class AllocatorUse:
    """One device's allocator; ``device`` is "cpu" or the GPU's index.

    allocations: number of allocations; peaks in bytes, None where the trace has none (before
    PyTorch 1.12). growth_bytes: allocated at the end of the window less at its begin.
    """

    device: str
    allocations: int
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    growth_bytes: int | None


def memory_use(events: Sequence[TraceEvent], window: Interval) -> tuple[AllocatorUse, ...]:
    """One for each device with [memory] events in the window, GPUs first."""
    low, high = window
    devices: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if low <= event.begin_us <= high and event.arguments is not None:
            devices[_device(event.arguments)].append(event)
    order = sorted(devices, key=lambda device: (device == "cpu", len(device), device))
    return tuple(_memory_use(device, devices[device]) for device in order)


def _device(arguments: Mapping[str, Any]) -> str:
    if arguments.get("Device Type", _CPU_TYPE) == _CPU_TYPE:
        return "cpu"
    return str(arguments.get("Device Id"))[:20]


def _memory_use(device: str, events: list[TraceEvent]) -> AllocatorUse:
    # Of events at one instant the larger total comes last, whatever their order in the file.
    events.sort(key=lambda e: (e.begin_us, e.whole("Total Allocated") or 0))
    allocated = [a for e in events if (a := e.whole("Total Allocated")) is not None]
    reserved = [r for e in events if (r := e.whole("Total Reserved")) is not None]
    return AllocatorUse(
        device=device,
        allocations=sum((e.whole("Bytes") or 0) > 0 for e in events),
        allocated_peak_bytes=max(allocated, default=None),
        reserved_peak_bytes=max(reserved, default=0) or None,
        growth_bytes=allocated[-1] - allocated[0] if allocated else None,
    )


_STEP = re.compile(r"ProfilerStep#?\s*(\d+)")
# stop() in the middle of a step leaves a last annotation of some µs.
RUNT_STEP_SHARE = 0.01
MIN_STEPS = 2
# What a trace without step annotations must hold to be as sure as one with them.
MIN_EVENTS_WITHOUT_STEPS = 100
# Of the window, what must be unexplained or the host's own to look for what the host was in.
MIN_NAMED_SHARE = 0.10


@dataclass(frozen=True, slots=True)
class Measures:
    """One trace's window and times. ``gpu`` is None for a CPU-only trace, then ``cpu`` is there.

    world_size, job: None where the trace does not have it.
    steps: begin and end of each step in µs; empty where the trace has no step annotations.
    loading: union of the DataLoader's iteration, on another thread where it is waited for (see
    host_events); loader: its events in the window.
    launches: calls that launch a kernel, to notice GPU events that were not recorded.
    host: what the host did besides operators. operators: the longest ones. synchronization: who
    waited for the device, or on a CPU-only trace read values as if there were one. memory: by
    device, empty without profile_memory. roofline: None without a GPU. per_step: as ``steps``.
    timeline: the longest step, to be drawn.
    lines: of the user's code in loading, gc, compile, checkpoint and the host's own time (with a
    GPU: while it idles for it); empty without stacks. doing: the calls, operators and annotations
    that the host was in during idle time that is unexplained, or its own, if it is much.
    savings: in µs by kind of finding, what a replay without it saves; empty where it is not known.
    node: which one it ran on, stage: of a pipeline and of how many, where known.
    """

    file: str
    rank: int | None
    world_size: int | None
    job: str | None
    device_name: str | None
    window: Interval
    steps: tuple[Interval, ...]
    loading: Intervals
    loader: tuple[TraceEvent, ...]
    launches: int
    gpu: GpuTime | None
    cpu: CpuTime | None
    host: HostTime
    operators: Operators
    synchronization: Synchronization
    memory: tuple[AllocatorUse, ...]
    roofline: Roofline | None
    per_step: tuple[StepTime, ...]
    timeline: StepTimeline | None
    lines: Mapping[str, tuple[CodeLine, ...]]
    doing: Mapping[str, tuple[CodeLine, ...]]
    savings: Mapping[str, float]
    node: str | None = None
    stage: tuple[int, int] | None = None

    @property
    def window_us(self) -> float:
        return self.window[1] - self.window[0]

    @property
    def window_s(self) -> float:
        return self.window_us / 1e6

    @property
    def label(self) -> str:
        whose = self.file if self.rank is None else f"rank {self.rank}"
        whose += f" on {self.node}" if self.node else ""
        several = self.gpu is not None and self.gpu.devices_in_use > 1
        return f"{whose}, GPU {self.gpu.device}" if several and self.gpu else whose

    @property
    def step_count(self) -> int:
        """At least 1: without annotations all is one step."""
        return len(self.steps) or 1

    def share(self, intervals: Intervals) -> float:
        """Of the window, 0 to 1."""
        return self.share_of_us(total(intervals))

    def share_of_us(self, us: float) -> float:
        return min(1.0, us / self.window_us) if self.window_us else 0.0

    @property
    def shortage(self) -> str | None:
        """Why this trace holds too little to conclude anything, in a clause; None if enough."""
        if self.gpu is None and self.launches:
            return (
                f"{self.launches} kernels were launched but no GPU event was recorded; record with "
                "ProfilerActivity.CUDA, and with no other profiler on the GPU"
            )
        if not self._events and not (self.cpu and self.cpu.collectives):
            return "there is no kernel and no operator of the training thread in the window"
        return None

    @property
    def brevity(self) -> str | None:
        """Why what this trace says is less sure, in a clause; None if it is not."""
        if self.steps and len(self.steps) < MIN_STEPS:
            return f"only {len(self.steps)} step was recorded"
        if not self.steps and self._events < MIN_EVENTS_WITHOUT_STEPS:
            return f"no step is annotated and there are only {self._events} kernels or operators"
        return None

    @property
    def _events(self) -> int:
        return self.gpu.kernels.count if self.gpu else self.cpu.operators_count if self.cpu else 0


def measure(trace: Trace) -> Measures:
    """Pure; the order of the trace's events does not matter."""
    step_events = _steps(trace)
    window, steps = _window(trace, step_events), tuple(spans(step_events))
    training = {e.thread for e in step_events} or _busiest_thread(trace)
    work = GpuEvents.of(trace)
    threads = training | work.threads
    host = host_time(trace, window, threads)
    loading = host.loading.intervals
    waited = _waits(trace, work, window, threads)
    found = _operators(trace, work, window, waited)
    running = union(span for thread in threads for span in found.running.get(thread, []))
    gpu = gpu_time(work, window, host, waited, running)
    cpu = None if gpu else cpu_time(trace, window, loading, training, host, steps)
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
        loader=_loader(trace, window, threads),
        launches=sum("LaunchKernel" in e.name for e in trace.events["runtime"]),
        gpu=gpu,
        cpu=cpu,
        host=host,
        operators=found,
        synchronization=synchronization(waited, steps, found.owners, found.lines),
        memory=memory_use(trace.events["memory"], window),
        roofline=roofline(trace.device_name, window, found.work, gpu) if gpu else None,
        per_step=per_step,
        timeline=longest_step(per_step, work.events, host, running, gpu),
        lines=longest_lines(trace.events["python"], training, _parts(host, gpu, cpu)),
        savings=(
            savings(work.of_device(gpu.device).events, work.calls, waited, window, host, gpu)
            if gpu
            else {}
        ),
        doing=_doing(trace, threads, window, gpu, cpu),
        stage=trace.stage,
    )


def _doing(
    trace: Trace, threads: set[str], window: Interval, gpu: GpuTime | None, cpu: CpuTime | None
) -> dict[str, tuple[CodeLine, ...]]:
    parts = {"host": cpu.host if cpu else []}
    if gpu:
        parts = {cause: gpu.idle_time.by_cause[cause] for cause in ("host", "unexplained")}
    least_us = MIN_NAMED_SHARE * (window[1] - window[0])
    large = {part: spent for part, spent in parts.items() if total(spent) > least_us}
    if not large:
        return {}
    events = [trace.events[kind] for kind in ("runtime", "operator", "annotation")]
    return longest_lines(list(chain.from_iterable(events)), threads, large, event_name)


def _parts(host: HostTime, gpu: GpuTime | None, cpu: CpuTime | None) -> dict[str, Intervals]:
    """What is worth a line of the user's code."""
    own = gpu.idle_time.by_cause["host"] if gpu else cpu.host if cpu else []
    return {
        "loading": host.loading.intervals,
        "gc": host.gc.intervals,
        "compile": host.compile.intervals,
        "checkpoint": host.checkpoint.intervals,
        "host": own,
        "unexplained": gpu.idle_time.by_cause["unexplained"] if gpu else [],
    }


def _loader(trace: Trace, window: Interval, threads: set[str]) -> tuple[TraceEvent, ...]:
    """Of the training threads, else of those that iterate for them."""
    found = [e for e in inside(trace.events["annotation"], window) if LOADING.match(e.name)]
    mine = [e for e in found if e.thread in threads] or found
    return tuple(sorted(mine, key=lambda e: (e.begin_us, e.end_us, e.thread, e.name)))


def _busiest_thread(trace: Trace) -> set[str]:
    """The thread with most operators, where no step annotation names the training thread."""
    counts = Counter(e.thread for e in trace.events["operator"])
    return {thread for thread, _ in counts.most_common(1)}


def _waits(
    trace: Trace, work: GpuEvents, window: Interval, threads: set[str]
) -> list[BlockingCall]:
    """What waits for the device; without one, what would."""
    if not work.events:
        return reads(trace.events["operator"], window, threads)
    return waits(trace.events["runtime"], by_correlation(work.copies), window, threads)


def _operators(
    trace: Trace, work: GpuEvents, window: Interval, waited: list[BlockingCall]
) -> Operators:
    launched: dict[str, dict[float, float]] = defaultdict(dict)
    calls = work.calls
    for _, begin_us, end_us, _, correlation, _ in work.events:
        call = calls.get(correlation)
        if call is not None:
            mine, at_us = launched[call.thread], call.begin_us
            mine[at_us] = mine.get(at_us, 0.0) + end_us - begin_us
    instants = {(wait.thread, wait.begin_us) for wait in waited}
    return operators(trace.events["operator"], trace.events["python"], window, launched, instants)


def _number(step: TraceEvent) -> int:
    match = _STEP.match(step.name)
    return int(match[1][:18]) if match else 0


def _steps(trace: Trace) -> list[TraceEvent]:
    """The ProfilerStep annotations in order, each name once, without a runt at the end."""
    named: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in trace.events["annotation"]:
        if _STEP.match(event.name):
            named[event.name].append(event)
    longest = [max(events, key=_size) for events in named.values()]
    steps = sorted(longest, key=lambda e: (e.begin_us, e.end_us, _number(e), e.name))
    if len(steps) > 1:
        usual_us = max(e.end_us - e.begin_us for e in steps)
        if steps[-1].end_us - steps[-1].begin_us < RUNT_STEP_SHARE * usual_us:
            steps.pop()
    return steps


def _size(event: TraceEvent) -> tuple[float, float, str]:
    """Among copies of a step on several threads the choice must not depend on their order."""
    return event.end_us - event.begin_us, -event.begin_us, event.thread


def _window(trace: Trace, steps: list[TraceEvent]) -> Interval:
    """All steps; else the span of the GPU's events; else that of everything."""
    gpu = trace.events["kernel"] + trace.events["copy"]
    chosen = steps or gpu or [e for kept in trace.events.values() for e in kept]
    return min(e.begin_us for e in chosen), max(e.end_us for e in chosen)
