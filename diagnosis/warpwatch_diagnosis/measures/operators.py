"""Operators by the time that they take on the host and on the device, with shapes and places."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from warpwatch_diagnosis.measures.code_lines import Instant, lines_at
from warpwatch_diagnosis.measures.flops import OperatorWork
from warpwatch_diagnosis.measures.intervals import Interval, Intervals
from warpwatch_diagnosis.measures.kernels import KernelClass
from warpwatch_diagnosis.measures.operator_sweep import OperatorSweep, OperatorTime
from warpwatch_diagnosis.trace.events import Event, by_begin

TOP = 20


@dataclass(frozen=True, slots=True)
class ClassWork:
    """What operators of known shapes computed with one class of kernels, and the sum of the
    kernels' µs that it took; ``dtype``: the one with most FLOPs. model_flops: without what is
    computed a second time."""

    flops: float
    model_flops: float
    bytes: float
    gpu_us: float
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Operators:
    """by_self_time, by_gpu_time: at most TOP each. owners, lines: the innermost operator around
    each instant that was asked for, and the line of the user's code. running: by thread, the union
    of the framework's operators that began in the window, in µs."""

    by_self_time: tuple[OperatorTime, ...]
    by_gpu_time: tuple[OperatorTime, ...]
    work: Mapping[KernelClass, ClassWork]
    owners: Mapping[Instant, str]
    lines: Mapping[Instant, str]
    running: Mapping[str, Intervals]


def operators(
    events: Sequence[Event],
    frames: Sequence[Event],
    window: Interval,
    launched: Mapping[str, Mapping[float, float]],
    instants: set[Instant],
) -> Operators:
    """``launched``: µs of GPU work by the thread and the begin of its launch call; ``instants``: of
    which the operator is wanted."""
    marks: dict[str, dict[float, float]] = defaultdict(dict)
    for thread, at_us in instants:
        marks[thread][at_us] = 0.0
    for thread, us in launched.items():
        marks[thread] |= us
    threads: dict[str, list[Event]] = defaultdict(list)
    low, high = window
    for event in events:
        if low <= event.begin_us < high:
            threads[event.thread].append(event)
    sweep = OperatorSweep(wanted=instants)
    for thread in sorted(threads):
        # Of operators that begin at one instant the longer one is the caller.
        mine = by_begin(threads[thread], lambda e: (-e.end_us, e.name))
        sweep.thread(thread, mine, sorted(marks.get(thread, {}).items()))
    sweep.resolve_convolutions()
    return _result(sweep, frames)


def _result(sweep: OperatorSweep, frames: Sequence[Event]) -> Operators:
    times = list(sweep.times.values())
    by_self = _top(times, "self_us")
    by_gpu = _top([time for time in times if time.gpu_us], "gpu_us")
    longest = {time.longest for time in by_self + by_gpu}
    lines = lines_at(frames, sweep.wanted | longest) | sweep.owner_lines
    for time in by_self + by_gpu:
        time.place = time.place or lines.get(time.longest)
    return Operators(
        by_self_time=by_self,
        by_gpu_time=by_gpu,
        work={known: _class_work(found) for known, found in sorted(sweep.work.items())},
        owners=sweep.owners,
        lines=lines,
        running=sweep.running,
    )


def _top(times: list[OperatorTime], by: str) -> tuple[OperatorTime, ...]:
    ordered = sorted(times, key=lambda t: (-getattr(t, by), t.name, t.shapes or ""))
    return tuple(ordered[:TOP])


def _class_work(found: list[tuple[OperatorWork, float]]) -> ClassWork:
    flops: Counter[str] = Counter()
    for work, _ in found:
        if work.dtype is not None:
            flops[work.dtype] += int(work.flops)
    return ClassWork(
        flops=sum(sorted(work.flops for work, _ in found)),
        model_flops=sum(sorted(work.flops - work.repeated for work, _ in found)),
        bytes=sum(sorted(work.bytes for work, _ in found)),
        gpu_us=sum(sorted(us for _, us in found)),
        dtype=min(flops, key=lambda dtype: (-flops[dtype], dtype)) if flops else None,
    )
