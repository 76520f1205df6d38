"""Measures operators by time on the host and on the device, with shapes, places and FLOPs.

A multiplication and an addition count as two. The formulas are those of the usual FLOP counters.
A product of (m, k) and (k, n) takes 2 m k n. A convolution takes 2 times the elements of its output
times the weight's elements per output channel. Attention takes 4 b h s t d forward (2 products)
and 2.5 times that backward, since its kernels compute the scores again. Bytes count every input and
output once, which is the least that the memory must move.
"""

from __future__ import annotations

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from warpwatch_diagnosis.intervals import Intervals, merge
from warpwatch_diagnosis.measures.code_lines import Instant, line_of_stack, lines_at
from warpwatch_diagnosis.measures.gpu_work import TOP, GpuWork, KernelClass
from warpwatch_diagnosis.trace.events import ONE_GRADIENT, THREAD, TraceEvent, by_begin, grouped
from warpwatch_diagnosis.trace.reader import Trace

_MAX_NAME = 200

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
    """Operators of one name and equal arguments; a convolution's work is known in the end."""

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
            time=self.times.setdefault((name, text), OperatorTime(name[:_MAX_NAME], text)),
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


def operators(trace: Trace, work: GpuWork, instants: set[Instant]) -> Operators:
    """Measure operators; ``instants`` are those whose operators are wanted."""
    # By thread and the begin of the launch call, the µs of GPU work.
    marks: dict[str, dict[float, float]] = defaultdict(dict)
    for thread, at_us in instants:
        marks[thread][at_us] = 0.0
    for _, begin_us, end_us, _, correlation, _ in work.events:
        call = work.calls.get(correlation)
        if call is not None:
            mine, at_us = marks[call.thread], call.begin_us
            mine[at_us] = mine.get(at_us, 0.0) + end_us - begin_us
    low, high = work.window
    begun = (e for e in trace.events["operator"] if low <= e.begin_us < high)
    sweep = OperatorSweep(wanted=instants)
    for thread, events in sorted(grouped(begun, THREAD).items()):
        # If two operators begin at one instant, the longer one is the caller.
        ordered = by_begin(events, lambda e: (-e.end_us, e.name))
        sweep.thread(thread, ordered, sorted(marks.get(thread, {}).items()))
    sweep.resolve_convolutions()
    return _result(sweep, trace.events["python"])


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


Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
# The FLOPs and the number of elements of the output.
Counted = tuple[float, float]
# Shapes beyond these limits are invalid; tensors of PyTorch have at most 64 dimensions.
MAX_TENSOR_ELEMENTS = 1 << 50
MAX_DIMENSIONS = 64
_DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8", "c10::Float8_e5m2": "float8", "signed char": "int8",
    "char": "int8",
}  # fmt: skip

# The names of process groups and operators, without "c10::" and in lower case.
_ITEM_BYTES = {
    "float": 4, "double": 8, "half": 2, "bfloat16": 2, "float16": 2, "int": 4, "long": 8,
    "long int": 8, "char": 1, "signed char": 1, "unsigned char": 1, "byte": 1, "bool": 1,
    "short": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "complex<float>": 8,
}  # fmt: skip


class OperatorWork(NamedTuple):
    """The work of one call, and the bytes that it moves at least; ``dtype`` is its first input's.

    repeated: the part of ``flops`` that forward computed before, which is not work of the model.
    """

    kernel_class: KernelClass
    flops: float
    bytes: float
    dtype: str | None
    repeated: float = 0.0


def shapes_of(arguments: Mapping[str, Any]) -> Shapes | None:
    """Return the recorded shapes of an operator's inputs; None if they are not recorded."""
    given = arguments.get("Input Dims")
    if isinstance(given, str):
        given = _parsed(given)
    if not isinstance(given, list | tuple):
        return None
    return tuple(_shape(one) for one in given)


def types_of(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the types of an operator's inputs, "" for an input without one."""
    given = arguments.get("Input type")
    return tuple(t if isinstance(t, str) else "" for t in given) if isinstance(given, list) else ()


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    """Parse shapes that some builds of PyTorch 1.8 wrote as text."""
    try:
        return ast.literal_eval(text[:10_000])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None


def _shape(given: Any) -> Shape:
    if not isinstance(given, list | tuple) or len(given) > MAX_DIMENSIONS:
        return ()
    sizes = [size for size in given if isinstance(size, int) and 0 <= size < MAX_TENSOR_ELEMENTS]
    # An empty dimension must not hide that the others are beyond bounds.
    bounded = prod(max(1, size) for size in sizes) < MAX_TENSOR_ELEMENTS
    return tuple(sizes) if len(sizes) == len(given) and bounded else ()


def work_of(
    name: str, shapes: Shapes, types: Sequence[str], one_gradient: bool = False
) -> OperatorWork | None:
    """Return the work of a call, or None if it does not follow from the shapes.

    ``one_gradient``: a convolution's backward call makes the gradient of input or weight alone.
    """
    if name not in _FORMULAS:
        return None
    kernel_class, formula, inputs = _FORMULAS[name]
    try:
        counted = formula(*(shapes[index] for index in inputs))
    except (IndexError, ValueError):
        # The call has fewer inputs or other dimensions than the formula.
        return None
    if counted is None or not 0 < counted[0] < MAX_TENSOR_ELEMENTS**2:
        return None
    if one_gradient and formula is _convolution_backward:
        counted = counted[0] / 2, counted[1]
    work = _work(kernel_class, shapes, types, counted)
    # One of the five products of its backward call computes the scores again.
    return work._replace(repeated=counted[0] / 5) if formula is _attention_backward else work


def item_bytes(dtype: object) -> int | None:
    """Return the bytes of a type, or None if it is unknown."""
    return _ITEM_BYTES.get(str(dtype).lower().removeprefix("c10::"))


def _work(
    kernel_class: KernelClass, shapes: Shapes, types: Sequence[str], counted: Counted
) -> OperatorWork:
    flops, output = counted
    first = next((t for t in types if t in _DTYPES), None)
    usual_bytes = item_bytes(first or "float") or 4
    inputs = sum(
        prod(shape) * (item_bytes(kind) or usual_bytes)
        for shape, kind in zip(shapes, [*types, *[""] * len(shapes)], strict=False)
        if shape
    )
    return OperatorWork(
        kernel_class, flops, inputs + output * usual_bytes, _DTYPES.get(first or "")
    )


def _product(left: Shape, right: Shape) -> Counted | None:
    (m, k), (inner, n) = left, right
    return (2.0 * m * k * n, float(m * n)) if k == inner else None


def _batched_product(left: Shape, right: Shape) -> Counted | None:
    (b, m, k), (other, inner, n) = left, right
    return (2.0 * b * m * k * n, float(b * m * n)) if k == inner and b == other else None


def _linear(given: Shape, weight: Shape) -> Counted | None:
    outputs, inputs = weight
    rows = prod(given[:-1])
    return (2.0 * rows * outputs * inputs, float(rows * outputs)) if given[-1] == inputs else None


def _convolution_backward(gradient: Shape, given: Shape, weight: Shape) -> Counted | None:
    """Count two gradients, each as forward; ``gradient`` is the output's."""
    forward = convolution(given, gradient, weight)
    return None if forward is None else (2 * forward, float(prod(given) + prod(weight)))


def convolution(given: Shape, output: Shape, weight: Shape) -> float | None:
    """Return the forward FLOPs of a convolution from input to output.

    The weight of a transposed convolution begins with the channels of the input. It uses every
    element of the input as often as a plain one makes an element of the output.
    """
    if len(output) < 3 or not len(given) == len(weight) == len(output):
        return None
    transposed = weight[0] == given[1] != output[1]
    return 2.0 * prod(given if transposed else output) * prod(weight[1:])


def _attention(query: Shape, key: Shape) -> Counted:
    """Count attention; both shapes are (batch, heads, length, head)."""
    (b, h, s, d), (_, _, t, _) = query, key
    return 4.0 * b * h * s * t * d, float(b * h * s * d)


def _attention_backward(query: Shape, key: Shape, value: Shape) -> Counted:
    return 2.5 * _attention(query, key)[0], float(prod(query) + prod(key) + prod(value))


_FUSED_ATTENTION = (
    "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
)  # fmt: skip
# The class of an operator's kernels, its formula, and the indices of the formula's inputs.
_FORMULAS: dict[str, tuple[KernelClass, Callable[..., Counted | None], tuple[int, ...]]] = {
    "aten::mm": ("gemm", _product, (0, 1)),
    "aten::addmm": ("gemm", _product, (1, 2)),
    "aten::_addmm_activation": ("gemm", _product, (1, 2)),
    "aten::bmm": ("gemm", _batched_product, (0, 1)),
    "aten::baddbmm": ("gemm", _batched_product, (1, 2)),
    "aten::linear": ("gemm", _linear, (0, 1)),
    "aten::_scaled_mm": ("gemm", _product, (0, 1)),
    "aten::convolution_backward": ("convolution", _convolution_backward, (0, 1, 2)),
    # PyTorch before 1.11 has the order input, gradient of the output, weight.
    "aten::cudnn_convolution_backward": ("convolution", _convolution_backward, (1, 0, 2)),
    "aten::scaled_dot_product_attention": ("attention", _attention, (0, 1)),
    **{
        f"aten::_scaled_dot_product_{kernels}": ("attention", _attention, (0, 1))
        for kernels in _FUSED_ATTENTION
    },
    # The inputs are the gradient of the output, query, key and value.
    **{
        f"aten::_scaled_dot_product_{kernels}_backward": (
            "attention", _attention_backward, (1, 2, 3)
        )
        for kernels in _FUSED_ATTENTION
    },
}  # fmt: skip
# No argument has the shape of their output: the backward call has it as a gradient.
CONVOLUTIONS = frozenset({"aten::convolution"})


def gradient_of_convolution(name: str, shapes: Shapes) -> tuple[Shape, Shape, Shape] | None:
    """Return input, weight and gradient of the output from a convolution's backward call."""
    known = _FORMULAS.get(name)
    if known is None or known[0] != "convolution" or len(shapes) < 3:
        return None
    gradient, given, weight = (shapes[index] for index in known[2])
    return given, weight, gradient


def convolution_work(shapes: Shapes, output: Shape, types: Sequence[str]) -> OperatorWork | None:
    """Return the work of a forward call whose output shape is known."""
    flops = convolution(shapes[0], output, shapes[1])
    return None if flops is None else _work("convolution", shapes, types, (flops, prod(output)))
