"""Measures operators by time on the host and on the device, with shapes, places and FLOPs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from warpwatch_diagnosis.measures.code_lines import Instant, line_of_stack, lines_at
from warpwatch_diagnosis.measures.flops import (
    CONVOLUTIONS,
    OperatorWork,
    Shape,
    Shapes,
    convolution_work,
    gradient_of_convolution,
    shapes_of,
    types_of,
    work_of,
)
from warpwatch_diagnosis.measures.intervals import Interval, Intervals, merge
from warpwatch_diagnosis.measures.kernels import KernelClass
from warpwatch_diagnosis.trace.events import ONE_GRADIENT, TraceEvent, by_begin

MAX_NAME = 200
TOP = 20
_MAX_SHAPES = 400
# Operators of PyTorch and of libraries, but not Python autograd functions, which may hold anything.
_OPERATOR = re.compile(r"(?!autograd::engine::evaluate_function: \w*Function)[\w.]+::")


@dataclass(slots=True)
class OperatorTime:
    """All calls of one operator with the same input shapes that began in the window.

    shapes: the inputs' shapes, ``[16, 64] [64, 8]``; None without record_shapes. place: the user's
    line of the longest call, None without stacks. total_us: with the operators inside; self_us:
    without. gpu_us: the kernels and copies that the operator itself launched. flops: all calls,
    None if unknown; counted once, for the innermost operator whose shapes are enough. longest:
    thread and begin of the longest call.
    """

    name: str
    shapes: str | None
    place: str | None = None
    count: int = 0
    total_us: float = 0.0
    self_us: float = 0.0
    gpu_us: float = 0.0
    flops: float | None = None
    longest: Instant = ("", 0.0)
    longest_us: float = -1.0


@dataclass(frozen=True, slots=True)
class _OperatorKind:
    """Operators of one name and equal arguments, and the work of one call.

    The work of a ``convolution`` is known only in the end.
    """

    name: str
    shapes: Shapes
    types: tuple[str, ...]
    place: str | None
    time: OperatorTime
    work: OperatorWork | None
    convolution: bool


@dataclass(slots=True)
class _OpenOperator:
    """An operator that has begun and not ended; ``counted``: FLOPs inside it are counted."""

    kind: _OperatorKind
    begin_us: float
    end_us: float
    counted: bool = False
    inside_us: float = 0.0
    own_gpu_us: float = 0.0
    gpu_us: float = 0.0


@dataclass(slots=True)
class OperatorSweep:
    """One pass over each thread's operators in order, with a stack of the open ones.

    wanted: instants whose operators go to ``owners``, and their lines to ``owner_lines``. work: by
    class, the calls with FLOPs and the µs of their kernels.
    """

    wanted: set[Instant]
    times: dict[tuple[str, str | None], OperatorTime] = field(default_factory=dict)
    owners: dict[Instant, str] = field(default_factory=dict)
    owner_lines: dict[Instant, str] = field(default_factory=dict)
    work: dict[KernelClass, list[tuple[OperatorWork, float]]] = field(default_factory=dict)
    running: dict[str, Intervals] = field(default_factory=dict)
    _gradients: dict[tuple[Shape, Shape], Shape] = field(default_factory=dict)
    _convolutions: list[tuple[_OperatorKind, float]] = field(default_factory=list)
    _kinds: dict[tuple[str, int], _OperatorKind] = field(default_factory=dict)

    def thread(
        self, thread: str, events: list[TraceEvent], marks: list[tuple[float, float]]
    ) -> None:
        """Pass over one thread; ``marks`` are instants and the µs of GPU work launched then."""
        operators = {name for name in {event.name for event in events} if _OPERATOR.match(name)}
        self.running[thread] = merge((e.begin_us, e.end_us) for e in events if e.name in operators)
        stack: list[_OpenOperator] = []
        kinds = self._kinds
        following = iter(marks)
        mark = next(following, None)
        for event in events:
            name, begin_us, end_us, _, _, arguments = event
            while mark is not None and mark[0] < begin_us:
                self._mark(thread, stack, *mark)
                mark = next(following, None)
            while stack and stack[-1].end_us <= begin_us:
                self._end(thread, stack)
            kind = kinds.get((name, id(arguments))) or self._learn(event)
            stack.append(_OpenOperator(kind, begin_us, end_us))
        while mark is not None:
            self._mark(thread, stack, *mark)
            mark = next(following, None)
        while stack:
            self._end(thread, stack)

    def _mark(self, thread: str, stack: list[_OpenOperator], at_us: float, gpu_us: float) -> None:
        while stack and stack[-1].end_us <= at_us:
            self._end(thread, stack)
        if not stack:
            return
        call = stack[-1]
        call.own_gpu_us += gpu_us
        call.gpu_us += gpu_us
        if (thread, at_us) in self.wanted:
            self.owners[thread, at_us] = call.kind.name
            if call.kind.place is not None:
                self.owner_lines[thread, at_us] = call.kind.place

    def _learn(self, event: TraceEvent) -> _OperatorKind:
        """Return the facts that the name and the arguments show for all such calls."""
        name, arguments = event.name, event.arguments or {}
        shapes, types, text = shapes_of(arguments), types_of(arguments), None
        if shapes is not None:
            text = " ".join(str(list(shape)) for shape in shapes if shape)[:_MAX_SHAPES]
        stack = arguments.get("Call stack")
        kind = self._kinds[name, id(event.arguments)] = _OperatorKind(
            name=name,
            shapes=shapes or (),
            types=types,
            place=line_of_stack(stack) if isinstance(stack, str) else None,
            time=self.times.setdefault((name, text), OperatorTime(name[:MAX_NAME], text)),
            work=work_of(name, shapes or (), types, ONE_GRADIENT in arguments),
            convolution=name in CONVOLUTIONS and shapes is not None,
        )
        backward = gradient_of_convolution(name, kind.shapes)
        if backward is not None:
            given, weight, gradient = backward
            self._gradients[given, weight] = gradient
        return kind

    def _end(self, thread: str, stack: list[_OpenOperator]) -> None:
        call = stack.pop()
        kind = call.kind
        time = kind.time
        took_us = call.end_us - call.begin_us
        time.count += 1
        time.total_us += took_us
        if took_us > call.inside_us:
            time.self_us += took_us - call.inside_us
        if took_us > time.longest_us:
            time.longest_us, time.longest = took_us, (thread, call.begin_us)
            time.place = kind.place
        if not call.counted and (kind.convolution or kind.work is not None):
            call.counted = True
            if kind.work is not None:
                self._count(time, kind.work, call.gpu_us)
            else:
                self._convolutions.append((kind, call.gpu_us))
        if call.own_gpu_us:
            time.gpu_us += call.own_gpu_us
        if stack:
            caller = stack[-1]
            caller.inside_us += took_us
            if call.gpu_us:
                caller.gpu_us += call.gpu_us
            if call.counted:
                caller.counted = True

    def _count(self, time: OperatorTime, work: OperatorWork, gpu_us: float) -> None:
        time.flops = (time.flops or 0.0) + work.flops
        self.work.setdefault(work.kernel_class, []).append((work, gpu_us))

    def resolve_convolutions(self) -> None:
        """Count the forward convolutions whose backward call has the shape of their output."""
        for kind, gpu_us in self._convolutions:
            shapes = kind.shapes
            gradient = self._gradients.get((shapes[0], shapes[1])) if len(shapes) > 1 else None
            work = convolution_work(shapes, gradient, kind.types) if gradient else None
            if work is not None:
                self._count(kind.time, work, gpu_us)


@dataclass(frozen=True, slots=True)
class ClassWork:
    """The work of operators with known shapes in one class of kernels, and the kernels' µs.

    model_flops: without repeated ones. dtype: the one with most FLOPs.
    """

    flops: float
    model_flops: float
    bytes: float
    gpu_us: float
    dtype: str | None


@dataclass(frozen=True, slots=True)
class Operators:
    """The TOP operators by time, and the work of all.

    owners, lines: the innermost operator around each requested instant, and the user's line.
    running: by thread, the union of operators that began in the window, in µs.
    """

    by_self_time: tuple[OperatorTime, ...]
    by_gpu_time: tuple[OperatorTime, ...]
    work: Mapping[KernelClass, ClassWork]
    owners: Mapping[Instant, str]
    lines: Mapping[Instant, str]
    running: Mapping[str, Intervals]


def operators(
    events: Sequence[TraceEvent],
    frames: Sequence[TraceEvent],
    window: Interval,
    launched: Mapping[str, Mapping[float, float]],
    instants: set[Instant],
) -> Operators:
    """Measure operators; ``instants`` are those whose operators are wanted.

    launched: µs of GPU work by the thread and the begin of its launch call.
    """
    marks: dict[str, dict[float, float]] = defaultdict(dict)
    for thread, at_us in instants:
        marks[thread][at_us] = 0.0
    for thread, us in launched.items():
        marks[thread] |= us
    threads: dict[str, list[TraceEvent]] = defaultdict(list)
    low, high = window
    for event in events:
        if low <= event.begin_us < high:
            threads[event.thread].append(event)
    sweep = OperatorSweep(wanted=instants)
    for thread in sorted(threads):
        # If two operators begin at one instant, the longer one is the caller.
        mine = by_begin(threads[thread], lambda e: (-e.end_us, e.name))
        sweep.thread(thread, mine, sorted(marks.get(thread, {}).items()))
    sweep.resolve_convolutions()
    return _result(sweep, frames)


def _result(sweep: OperatorSweep, frames: Sequence[TraceEvent]) -> Operators:
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
