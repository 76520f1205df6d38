"""Counts floating point operations and bytes of an operator from the shapes of its inputs.

A multiplication and an addition count as two. The formulas are those of the usual FLOP counters.
A product of (m, k) and (k, n) takes 2 m k n. A convolution takes 2 times the elements of its output
times the weight's elements per output channel. Attention takes 4 b h s t d forward (2 products)
and 2.5 times that backward, since its kernels compute the scores again. Bytes count every input and
output once, which is the least that the memory must move.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from warpwatch_diagnosis.measures.collectives import item_bytes
from warpwatch_diagnosis.measures.kernels import KernelClass

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
# The FLOPs and the number of elements of the output.
Counted = tuple[float, float]
# Shapes beyond these limits are invalid; tensors of PyTorch have at most 64 dimensions.
MAX_ELEMENTS = 1 << 50
MAX_DIMENSIONS = 64
_DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8", "c10::Float8_e5m2": "float8", "signed char": "int8",
    "char": "int8",
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
    sizes = [size for size in given if isinstance(size, int) and 0 <= size < MAX_ELEMENTS]
    # An empty dimension must not hide that the others are beyond bounds.
    bounded = prod(max(1, size) for size in sizes) < MAX_ELEMENTS
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
    if counted is None or not 0 < counted[0] < MAX_ELEMENTS**2:
        return None
    if one_gradient and formula is _convolution_backward:
        counted = counted[0] / 2, counted[1]
    work = _work(kernel_class, shapes, types, counted)
    # One of the five products of its backward call computes the scores again.
    return work._replace(repeated=counted[0] / 5) if formula is _attention_backward else work


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
