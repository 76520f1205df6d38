"""Operators by the time that they take on the host and on the device, with shapes and places."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from warpwatch_diagnosis.measures.flops import Work
from warpwatch_diagnosis.measures.intervals import Interval, Intervals
from warpwatch_diagnosis.measures.kernels import KernelClass
from warpwatch_diagnosis.measures.operator_sweep import OperatorSweep, OperatorTotal
from warpwatch_diagnosis.measures.places import Instant
from warpwatch_diagnosis.trace.events import by_begin
from warpwatch_diagnosis.trace.reader import Event

TOP = 20
MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """All calls of one operator with the same input shapes that began in the window.

    shapes: of the inputs that have one, ``[16, 64] [64, 8]``; None without record_shapes. place:
    line of the user's code of the longest call, None without stacks. total_us: of the calls with
    what they call; self_us: without. gpu_us: sum of the kernels and copies that the operator itself
    launched, not operators inside it. flops: of all calls, None where unknown; counted once, for
    the outermost operator whose shapes tell. longest: thread and begin of the longest call.
    """

    name: str
    shapes: str | None
    place: str | None
    count: int
    total_us: float
    self_us: float
    gpu_us: float
    flops: float | None
    longest: Instant


@dataclass(frozen=True, slots=True)
class ClassWork:
    """What operators of known shapes computed with one class of kernels, and the sum of the
    kernels' µs that it took; ``dtype``: the one with most FLOPs."""

    flops: float
    bytes: float
    gpu_us: float
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Operators:
    """by_self_time, by_gpu_time: at most TOP each. owners: the innermost operator around each
    instant that was asked for; owner_places: its line where the operator has a stack. running: by
    thread, the union of the framework's operators that began in the window, in µs."""

    by_self_time: tuple[OperatorTime, ...]
    by_gpu_time: tuple[OperatorTime, ...]
    count: int
    work: Mapping[KernelClass, ClassWork]
    owners: Mapping[Instant, str]
    owner_places: Mapping[Instant, str]
    running: Mapping[str, Intervals]

    @property
    def longest(self) -> set[Instant]:
        return {time.longest for time in self.by_self_time + self.by_gpu_time}

    def with_places(self, places: Mapping[Instant, str]) -> Operators:
        """The same with the lines of operators that had none."""

        def placed(times: tuple[OperatorTime, ...]) -> tuple[OperatorTime, ...]:
            return tuple(replace(t, place=t.place or places.get(t.longest)) for t in times)

        by_self, by_gpu = placed(self.by_self_time), placed(self.by_gpu_time)
        return replace(self, by_self_time=by_self, by_gpu_time=by_gpu)


def operators(
    events: Sequence[Event],
    window: Interval,
    launched: Mapping[str, Mapping[float, float]],
    instants: Iterable[Instant],
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
    sweep = OperatorSweep(wanted=set(instants))
    for thread in sorted(threads):
        # Of operators that begin at one instant the longer one is the caller.
        mine = by_begin(threads[thread], lambda e: (-e.end_us, e.name))
        sweep.thread(thread, mine, sorted(marks.get(thread, {}).items()))
    sweep.resolve_convolutions()
    return _result(sweep)


def _result(sweep: OperatorSweep) -> Operators:
    times = [_operator_time(key, total) for key, total in sweep.totals.items()]
    return Operators(
        by_self_time=_top(times, "self_us"),
        by_gpu_time=_top([time for time in times if time.gpu_us], "gpu_us"),
        count=sum(time.count for time in times),
        work={known: _class_work(found) for known, found in sorted(sweep.work.items())},
        owners=sweep.owners,
        owner_places=sweep.owner_places,
        running=sweep.running,
    )


def _operator_time(key: tuple[str, str | None], total: OperatorTotal) -> OperatorTime:
    return OperatorTime(
        name=key[0][:MAX_NAME],
        shapes=key[1],
        place=total.place,
        count=total.count,
        total_us=total.total_us,
        self_us=total.self_us,
        gpu_us=total.gpu_us,
        flops=total.flops,
        longest=total.longest,
    )


def _top(times: list[OperatorTime], by: str) -> tuple[OperatorTime, ...]:
    ordered = sorted(times, key=lambda t: (-getattr(t, by), t.name, t.shapes or ""))
    return tuple(ordered[:TOP])


def _class_work(found: list[tuple[Work, float]]) -> ClassWork:
    flops: Counter[str] = Counter()
    for work, _ in found:
        if work.dtype is not None:
            flops[work.dtype] += int(work.flops)
    return ClassWork(
        flops=sum(sorted(work.flops for work, _ in found)),
        bytes=sum(sorted(work.bytes for work, _ in found)),
        gpu_us=sum(sorted(map(itemgetter(1), found))),
        dtype=min(flops, key=lambda dtype: (-flops[dtype], dtype)) if flops else None,
    )
