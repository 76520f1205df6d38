"""Measures one trace, for the rules, the reports and the JSON of docs/diagnosis.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain
from typing import Any

from warpwatch_diagnosis.intervals import Interval, Intervals, total, union
from warpwatch_diagnosis.measures.code_lines import CodeLine, event_name, longest_lines
from warpwatch_diagnosis.measures.cpu_time import CpuTime, cpu_time
from warpwatch_diagnosis.measures.gpu_time import GpuTime, gpu_time
from warpwatch_diagnosis.measures.gpu_work import GpuWork, by_correlation
from warpwatch_diagnosis.measures.host_events import (
    ACTIVITIES,
    CAUSES,
    LOADING,
    HostTime,
    host_time,
)
from warpwatch_diagnosis.measures.iterations import ServerTime, server_time
from warpwatch_diagnosis.measures.operators import Operators, operators
from warpwatch_diagnosis.measures.replay import savings
from warpwatch_diagnosis.measures.roofline import Roofline, roofline
from warpwatch_diagnosis.measures.runtime_calls import (
    BlockingCall,
    Synchronization,
    reads,
    synchronization,
    waits,
)
from warpwatch_diagnosis.measures.steps import (
    StepTime,
    StepTimeline,
    longest_step,
    step_events,
    step_times,
)
from warpwatch_diagnosis.trace.events import TraceEvent, grouped, inside, spans
from warpwatch_diagnosis.trace.reader import Trace

MIN_STEPS = 2
# A trace without step annotations must hold this many events to be as sure as one with them.
MIN_EVENTS_WITHOUT_STEPS = 100
# If more of the window than this is unexplained or the host's own, the host's events name it.
MIN_UNNAMED_SHARE = 0.10
# The c10::DeviceType without memory of its own.
_CPU_TYPE = 0


@dataclass(frozen=True, slots=True)
class AllocatorUse:
    """One device's allocator; ``device`` is "cpu" or the GPU's index.

    allocations: their number. Peaks in bytes are None before PyTorch 1.12. growth_bytes: allocated
    at the end of the window less at its begin.
    """

    device: str
    allocations: int
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    growth_bytes: int | None


@dataclass(frozen=True, slots=True)
class Measures:
    """The numbers of one trace in its window. Either ``gpu`` or ``cpu`` is None.

    world_size, job, node, stage (of a pipeline, and their number): None if unknown. steps,
    per_step, timeline: empty or None without step annotations. loading: union of the DataLoader's
    iteration, on another thread only as far as the training threads wait for it; loader: its
    events. launches: calls that launch a kernel, to notice GPU events that were not recorded.
    synchronization: waits for the device, in a CPU-only trace reads of values. memory: by device,
    empty without profile_memory. lines: of the user's code in loading, gc, compile, checkpoint and
    the host's own time; empty without stacks. doing: the calls, operators and annotations of the
    host in long idle time that is unexplained or the host's own. savings: in µs by kind of finding,
    from a replay without it.
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
    def is_amd(self) -> bool:
        """Whether the GPU is from AMD, where NVIDIA's tools do not work."""
        return "AMD" in (self.device_name or "")

    @property
    def window_us(self) -> float:
        return self.window[1] - self.window[0]

    @property
    def window_s(self) -> float:
        return self.window_us / 1e6

    @property
    def server(self) -> ServerTime | None:
        """The iterations of an inference server; None in a training."""
        return self.host.server

    @property
    def label(self) -> str:
        """The name of the rank, its node and its GPU in a sentence."""
        name = self.file if self.rank is None else f"rank {self.rank}"
        name += f" on {self.node}" if self.node else ""
        several = self.gpu is not None and self.gpu.devices_in_use > 1
        return f"{name}, GPU {self.gpu.device}" if several and self.gpu else name

    @property
    def step_count(self) -> int:
        """The number of steps; 1 without annotations."""
        return len(self.steps) or 1

    @property
    def step_us(self) -> float:
        """The mean time of a step; a server's wait for work belongs to none."""
        waiting = self.server.waiting if self.server else []
        return (self.window_us - total(waiting)) / self.step_count

    def share(self, intervals: Intervals) -> float:
        """Return the share of the window, 0 to 1."""
        return self.share_of_us(total(intervals))

    def share_of_us(self, us: float) -> float:
        return min(1.0, us / self.window_us) if self.window_us else 0.0

    @property
    def shortage(self) -> str | None:
        """The reason why this trace holds too little for a conclusion, as a clause, or None."""
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
        """The reason why conclusions from this trace are less sure, as a clause, or None."""
        if self.steps and len(self.steps) < MIN_STEPS:
            return f"only {len(self.steps)} step was recorded"
        if not self.steps and self._events < MIN_EVENTS_WITHOUT_STEPS:
            return f"no step is annotated and there are only {self._events} kernels or operators"
        return None

    @property
    def _events(self) -> int:
        return self.gpu.kernels.count if self.gpu else self.cpu.operators_count if self.cpu else 0


def measure(trace: Trace) -> Measures:
    """Measure a trace; the order of its events does not matter."""
    server, iterations = server_time(trace)
    stepping = iterations or step_events(trace)
    window, steps = _window(trace, stepping), tuple(spans(stepping))
    # Without steps, the thread with most operators trains.
    counts = Counter(e.thread for e in (stepping or trace.events["operator"]))
    training = set(counts) if stepping else {thread for thread, _ in counts.most_common(1)}
    work = GpuWork.of(trace, window)
    threads = training | work.threads
    host = host_time(trace, window, threads, server)
    loading = host.loading.intervals
    waited = _waits(trace, work, threads)
    found = operators(trace, work, {(wait.thread, wait.begin_us) for wait in waited})
    running = union(span for thread in threads for span in found.running.get(thread, []))
    gpu = gpu_time(work, host, waited, running)
    cpu = None if gpu else cpu_time(trace, window, training, host, steps)
    per_step = step_times(stepping, loading, gpu)
    parts = _parts(gpu, cpu)
    named = {
        "loading": loading,
        "gc": host.gc.intervals,
        "compile": host.compile.intervals,
        "checkpoint": host.checkpoint.intervals,
    }
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
        memory=_memory(trace.events["memory"], window),
        roofline=roofline(trace.device_name, window, found.work, gpu) if gpu else None,
        per_step=per_step,
        timeline=longest_step(per_step, work.events, host, running, gpu),
        lines=longest_lines(trace.events["python"], training, named | parts),
        savings=savings(work.of_device(gpu.device), waited, host, gpu) if gpu else {},
        doing=_doing(trace, threads, window, parts),
        stage=trace.stage,
    )


def _parts(gpu: GpuTime | None, cpu: CpuTime | None) -> dict[str, Intervals]:
    """Return the time without a name of its own."""
    if gpu is not None:
        return {cause: gpu.idle_time.of(cause) for cause in ("host", "unexplained")}
    return {"host": cpu.host if cpu else []}


def _doing(
    trace: Trace, threads: set[str], window: Interval, parts: Mapping[str, Intervals]
) -> dict[str, tuple[CodeLine, ...]]:
    least_us = MIN_UNNAMED_SHARE * (window[1] - window[0])
    large = {part: spent for part, spent in parts.items() if total(spent) > least_us}
    if not large:
        return {}
    events = [trace.events[kind] for kind in ("runtime", "operator", "annotation")]
    return longest_lines(list(chain.from_iterable(events)), threads, large, event_name)


def _loader(trace: Trace, window: Interval, threads: set[str]) -> tuple[TraceEvent, ...]:
    """Return the loader's events of the training threads, else of other threads."""
    found = [e for e in inside(trace.events["annotation"], window) if LOADING.match(e.name)]
    mine = [e for e in found if e.thread in threads] or found
    return tuple(sorted(mine, key=lambda e: (e.begin_us, e.end_us, e.thread, e.name)))


def _waits(trace: Trace, work: GpuWork, threads: set[str]) -> list[BlockingCall]:
    """Return the waits for the device; without one, the calls that would wait."""
    if not work.events:
        return reads(trace.events["operator"], work.window, threads)
    return waits(trace.events["runtime"], by_correlation(work.copies), work.window, threads)


def _window(trace: Trace, steps: list[TraceEvent]) -> Interval:
    """Return the span of all steps, else of the GPU's events, else of all events."""
    gpu = trace.events["kernel"] + trace.events["copy"]
    chosen = steps or gpu or [e for kept in trace.events.values() for e in kept]
    return min(e.begin_us for e in chosen), max(e.end_us for e in chosen)


def _memory(events: Sequence[TraceEvent], window: Interval) -> tuple[AllocatorUse, ...]:
    """Measure each device with [memory] events of profile_memory=True, GPUs first."""
    low, high = window
    devices = grouped((e for e in events if low <= e.begin_us <= high and e.arguments), _allocator)
    order = sorted(devices, key=lambda device: (device == "cpu", len(device), device))
    return tuple(_allocator_use(device, devices[device]) for device in order)


def _allocator(event: TraceEvent) -> str:
    given = event.arguments or {}
    on_cpu = given.get("Device Type", _CPU_TYPE) == _CPU_TYPE
    return "cpu" if on_cpu else str(given.get("Device Id"))[:20]


def _allocator_use(device: str, events: list[TraceEvent]) -> AllocatorUse:
    # The larger total of one instant comes last, so the order of the events does not matter.
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


# Times are in µs with ns; ratios are exact to a hundredth of a percent.
_TIME_DIGITS = 3
_RATIO_DIGITS = 4
_COUNT_DIGITS = 2


def trace_json(measures: Measures) -> dict[str, Any]:
    """Return one entry of ``traces``; times are in µs from the window's begin."""
    gpu, operators = measures.gpu, measures.operators
    return {
        "file": measures.file,
        "rank": measures.rank,
        **({"node": measures.node} if measures.node else {}),
        "device_name": measures.device_name,
        "steps": len(measures.steps),
        "window_s": round(measures.window_s, 6),
        "time": gpu_ratios(measures),
        "cpu": cpu_ratios(measures),
        "idle": _idle(measures),
        "per_step": _per_step(measures),
        "kernels": plain(gpu.kernel_times) if gpu else [],
        "classes": plain(gpu.class_times) if gpu else [],
        "copies": plain(gpu.copy_times) if gpu else [],
        "launches": plain(gpu.launches) if gpu else None,
        "device": gpu.device if gpu else None,
        "devices": plain(gpu.devices) if gpu else [],
        "streams": plain(gpu.streams) if gpu else [],
        "synchronization": plain(measures.synchronization),
        "operators": {
            "by_self_time": plain(operators.by_self_time, without=("longest", "longest_us")),
            "by_gpu_time": plain(operators.by_gpu_time, without=("longest", "longest_us")),
        },
        "host": _host(measures),
        "memory": plain(measures.memory),
        "roofline": plain(measures.roofline),
    }


def gpu_ratios(measures: Measures) -> dict[str, float | None]:
    gpu, overlap = measures.gpu, measures.gpu.overlap_ratio if measures.gpu else None
    unions: dict[str, Intervals | None] = {
        "gpu_busy_ratio": gpu.busy if gpu else None,
        "idle_ratio": gpu.idle if gpu else None,
        "compute_ratio": gpu.compute if gpu else None,
        "communication_ratio": gpu.communication if gpu else None,
        "exposed_communication_ratio": gpu.exposed_communication if gpu else None,
        "overlap_ratio": None,
        "memory_copy_ratio": gpu.copies if gpu else None,
        "data_loading_ratio": measures.loading,
    }
    found = {k: None if us is None else _ratio(measures, us) for k, us in unions.items()}
    return found | {"overlap_ratio": None if overlap is None else round(overlap, _RATIO_DIGITS)}


def cpu_ratios(measures: Measures) -> dict[str, float] | None:
    cpu = measures.cpu
    if cpu is None:
        return None
    parts = {
        "operator_ratio": cpu.operators,
        "dispatch_ratio": cpu.dispatch,
        "collective_wait_ratio": cpu.waiting,
        "host_ratio": cpu.host,
        "compile_ratio": cpu.compile,
        "gc_ratio": cpu.gc,
        "checkpoint_ratio": cpu.checkpoint,
    }
    if measures.server is not None:
        parts["scheduler_ratio"] = cpu.scheduler
        parts["waiting_for_work_ratio"] = cpu.waiting_for_work
    return {key: _ratio(measures, intervals) for key, intervals in parts.items()}


def _ratio(measures: Measures, intervals: Intervals) -> float:
    return round(measures.share(intervals), _RATIO_DIGITS)


def _idle(measures: Measures) -> dict[str, float] | None:
    """Return shares of the window by cause, which add up to ``idle_ratio``."""
    if measures.gpu is None:
        return None
    window_us = measures.window_us or 1.0
    spent = measures.gpu.idle_time
    shares = {
        cause: spent.total_us(cause) / window_us for cause in CAUSES if cause in spent.by_cause
    }
    return {cause: round(share, _RATIO_DIGITS) for cause, share in shares.items()}


def _per_step(measures: Measures) -> list[dict[str, Any]]:
    return [
        {
            "begin_us": round(step.begin_us - measures.window[0], _TIME_DIGITS),
            "duration_us": round(step.duration_us, _TIME_DIGITS),
            **plain(step, without=("begin_us", "end_us")),
        }
        for step in measures.per_step
    ]


def _host(measures: Measures) -> dict[str, Any]:
    host = measures.host
    activities = {name: plain(getattr(host, name), without=("intervals",)) for name in ACTIVITIES}
    return activities | {
        "compiled_regions": host.compiled_regions,
        "recompiled_regions": host.recompiled_regions,
    }


def plain(value: Any, without: tuple[str, ...] = (), name: str = "") -> Any:
    """Turn dataclasses into objects, except the fields ``without``; ``name`` decides rounding."""
    if isinstance(value, float):
        digits = _RATIO_DIGITS if name.endswith("ratio") else _TIME_DIGITS
        return round(value, _COUNT_DIGITS if name.endswith("_count") else digits)
    if is_dataclass(value):
        kept = [f.name for f in fields(value) if f.name not in without]
        return {key: plain(getattr(value, key), name=key) for key in kept}
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, tuple | list):
        return [plain(one, without) for one in value]
    return value
