"""One pass over the operators of a trace: who calls whom, how long it takes, what it computes."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from warpwatch_diagnosis.measures.flops import (
    CONVOLUTIONS,
    Shape,
    Work,
    convolution_work,
    gradient_of_convolution,
    work_of,
)
from warpwatch_diagnosis.measures.intervals import Intervals, merge
from warpwatch_diagnosis.measures.kernels import KernelClass
from warpwatch_diagnosis.measures.places import Instant
from warpwatch_diagnosis.measures.signature import NO_SIGNATURE, Signature, signature_of
from warpwatch_diagnosis.trace.reader import Event


@dataclass(slots=True)
class OperatorTotal:
    """All calls of one operator with the same shapes; times in µs, as in operators."""

    place: str | None = None
    count: int = 0
    total_us: float = 0.0
    self_us: float = 0.0
    gpu_us: float = 0.0
    flops: float | None = None
    longest_us: float = -1.0
    longest: Instant = ("", 0.0)


@dataclass(frozen=True, slots=True)
class _Known:
    """An operator with its arguments; ``computes``: its FLOPs are known, of a ``convolution`` only
    in the end."""

    name: str
    signature: Signature
    total: OperatorTotal
    work: Work | None
    convolution: bool
    computes: bool


@dataclass(slots=True)
class _Call:
    """An operator that has begun and not ended. ``counted``: FLOPs of an operator inside are."""

    known: _Known
    begin_us: float
    end_us: float
    counted: bool = False
    inside_us: float = 0.0
    own_gpu_us: float = 0.0
    gpu_us: float = 0.0


# Operators of PyTorch and of libraries; not a Python autograd function, which may hold anything.
_OPERATOR = re.compile(r"(?!autograd::engine::evaluate_function: \w*Function)[\w.]+::")
_ConvolutionKey = tuple[Shape, Shape]


@dataclass(slots=True)
class OperatorSweep:
    """Goes through each thread's operators in order, with a stack of those under way.

    wanted: instants of which the operator is wanted, in ``owners`` then. work: of each class, the
    calls whose FLOPs are counted and the sum of the µs of their kernels.
    """

    wanted: set[Instant]
    totals: dict[tuple[str, str | None], OperatorTotal] = field(default_factory=dict)
    owners: dict[Instant, str] = field(default_factory=dict)
    owner_places: dict[Instant, str] = field(default_factory=dict)
    work: dict[KernelClass, list[tuple[Work, float]]] = field(default_factory=dict)
    running: dict[str, Intervals] = field(default_factory=dict)
    gradients: dict[_ConvolutionKey, Shape] = field(default_factory=dict)
    convolutions: list[tuple[OperatorTotal, Signature, float]] = field(default_factory=list)
    _known: dict[tuple[str, int], _Known] = field(default_factory=dict)

    def thread(self, thread: str, events: list[Event], marks: list[tuple[float, float]]) -> None:
        self.running[thread] = _running(events)
        stack: list[_Call] = []
        known = self._known
        following = iter(marks)
        mark = next(following, None)
        for event in events:
            name, begin_us, end_us, _, _, arguments = event
            while mark is not None and mark[0] < begin_us:
                self._mark(thread, stack, *mark)
                mark = next(following, None)
            while stack and stack[-1].end_us <= begin_us:
                self._end(thread, stack)
            what = known.get((name, id(arguments))) or self._learn(event)
            stack.append(_Call(what, begin_us, end_us))
        while mark is not None:
            self._mark(thread, stack, *mark)
            mark = next(following, None)
        while stack:
            self._end(thread, stack)

    def _mark(self, thread: str, stack: list[_Call], at_us: float, gpu_us: float) -> None:
        while stack and stack[-1].end_us <= at_us:
            self._end(thread, stack)
        if not stack:
            return
        call = stack[-1]
        call.own_gpu_us += gpu_us
        call.gpu_us += gpu_us
        if (thread, at_us) in self.wanted:
            self.owners[thread, at_us] = call.known.name
            if call.known.signature.place is not None:
                self.owner_places[thread, at_us] = call.known.signature.place

    def _learn(self, event: Event) -> _Known:
        """What one look at the name and the arguments tells of all such calls."""
        name, arguments = event.name, event.arguments
        signature = NO_SIGNATURE if arguments is None else signature_of(arguments)
        shapes = signature.shapes
        work = work_of(name, shapes, signature.types) if shapes is not None else None
        convolution = name in CONVOLUTIONS and shapes is not None
        known = self._known[name, id(arguments)] = _Known(
            name=name,
            signature=signature,
            total=self.totals.setdefault((name, signature.text), OperatorTotal()),
            work=work,
            convolution=convolution,
            computes=convolution or work is not None,
        )
        backward = gradient_of_convolution(name, shapes or ())
        if backward is not None:
            given, weight, gradient = backward
            self.gradients[given, weight] = gradient
        return known

    def _end(self, thread: str, stack: list[_Call]) -> None:
        call = stack.pop()
        known = call.known
        total = known.total
        took_us = call.end_us - call.begin_us
        total.count += 1
        total.total_us += took_us
        if took_us > call.inside_us:
            total.self_us += took_us - call.inside_us
        if took_us > total.longest_us:
            total.longest_us, total.longest = took_us, (thread, call.begin_us)
            total.place = known.signature.place
        if known.computes and not call.counted:
            call.counted = True
            self._compute(known, call.gpu_us)
        if call.own_gpu_us:
            total.gpu_us += call.own_gpu_us
        if stack:
            caller = stack[-1]
            caller.inside_us += took_us
            if call.gpu_us:
                caller.gpu_us += call.gpu_us
            if call.counted:
                caller.counted = True

    def _compute(self, known: _Known, gpu_us: float) -> None:
        """Counts the call's FLOPs, a convolution's in the end."""
        if known.convolution:
            self.convolutions.append((known.total, known.signature, gpu_us))
        elif known.work is not None:
            self._count(known.total, known.work, gpu_us)

    def _count(self, total: OperatorTotal, work: Work, gpu_us: float) -> None:
        total.flops = (total.flops or 0.0) + work.flops
        self.work.setdefault(work.kernel_class, []).append((work, gpu_us))

    def resolve_convolutions(self) -> None:
        """Counts the forward convolutions whose backward call told the shape of their output."""
        for total, signature, gpu_us in self.convolutions:
            shapes = signature.shapes or ()
            gradient = self.gradients.get((shapes[0], shapes[1])) if len(shapes) > 1 else None
            work = convolution_work(shapes, gradient, signature.types) if gradient else None
            if work is not None:
                self._count(total, work, gpu_us)


def _running(events: list[Event]) -> Intervals:
    """``events``: of one thread by their begin."""
    known: dict[str, bool] = {}
    spans: Intervals = []
    until_us = -1.0
    for event in events:
        if event.end_us <= until_us:
            continue
        name = event.name
        if name not in known:
            known[name] = _OPERATOR.match(name) is not None
        if known[name]:
            spans.append((event.begin_us, event.end_us))
            until_us = event.end_us
    return merge(spans)
