"""Floating point operations and bytes of an operator, from the shapes of its inputs.

A multiplication and an addition count as two. The formulas are those of the usual FLOP counters:
a product of (m, k) and (k, n) takes 2 m k n; a convolution 2 times the elements of its output
times the weight's elements per output channel; attention 4 b h s t d forward (2 products) and 2.5
times that backward, since its kernels compute the scores again. Bytes count every input and output
once, which is the least that the memory must move.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

from warpwatch_diagnosis.measures.kernels import KernelClass

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
# FLOPs and the elements of the output.
Counted = tuple[float, float]
# A shape with more elements than this, or dimensions than PyTorch's tensors have, is none.
MAX_ELEMENTS = 1 << 50
MAX_DIMENSIONS = 64
_ITEM_BYTES = {
    "float": 4, "double": 8, "c10::Half": 2, "c10::BFloat16": 2, "half": 2, "long": 8,
    "long int": 8, "int": 4, "short": 2, "char": 1, "signed char": 1, "unsigned char": 1,
    "bool": 1, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1, "c10::complex<float>": 8,
}  # fmt: skip
_DTYPES = {
    "float": "float32", "double": "float64", "c10::Half": "float16", "c10::BFloat16": "bfloat16",
    "c10::Float8_e4m3fn": "float8", "c10::Float8_e5m2": "float8", "signed char": "int8",
    "char": "int8",
}  # fmt: skip


class Work(NamedTuple):
    """What one call computes and moves at least; ``dtype``: of its first input."""

    kernel_class: KernelClass
    flops: float
    bytes: float
    dtype: str | None


def shapes_of(arguments: Mapping[str, Any] | None) -> Shapes | None:
    """The shapes of an operator's inputs as recorded; None without record_shapes."""
    given = arguments.get("Input Dims") if arguments else None
    if isinstance(given, str):
        given = _parsed(given)
    if not isinstance(given, list | tuple):
        return None
    return tuple(_shape(one) for one in given)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Any:
    """PyTorch 1.8 wrote the shapes as text in some builds."""
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


def work_of(name: str, shapes: Shapes, types: Sequence[str]) -> Work | None:
    """None for operators whose work the shapes do not tell."""
    known = _FORMULAS.get(name)
    if known is None:
        return None
    kernel_class, formula = known
    try:
        counted = formula(shapes)
    except IndexError:
        return None
    if counted is None or not 0 < counted[0] < MAX_ELEMENTS**2:
        return None
    return _work(kernel_class, shapes, types, counted)


def _work(
    kernel_class: KernelClass, shapes: Shapes, types: Sequence[str], counted: Counted
) -> Work:
    flops, output = counted
    first = next((t for t in types if t in _DTYPES), None)
    item_bytes = _ITEM_BYTES.get(first or "float", 4)
    inputs = sum(
        prod(shape) * _ITEM_BYTES.get(kind, item_bytes)
        for shape, kind in zip(shapes, [*types, *[""] * len(shapes)], strict=False)
        if shape
    )
    return Work(kernel_class, flops, inputs + output * item_bytes, _DTYPES.get(first or ""))


def _mm(shapes: Shapes, first: int = 0) -> Counted | None:
    (m, k), (inner, n) = _rank(shapes[first], 2), _rank(shapes[first + 1], 2)
    return (2.0 * m * k * n, float(m * n)) if k == inner else None


def _addmm(shapes: Shapes) -> Counted | None:
    return _mm(shapes, 1)


def _bmm(shapes: Shapes, first: int = 0) -> Counted | None:
    (b, m, k), (other, inner, n) = _rank(shapes[first], 3), _rank(shapes[first + 1], 3)
    same = k == inner and b == other
    return (2.0 * b * m * k * n, float(b * m * n)) if same else None


def _baddbmm(shapes: Shapes) -> Counted | None:
    return _bmm(shapes, 1)


def _linear(shapes: Shapes) -> Counted | None:
    given, weight = shapes[0], _rank(shapes[1], 2)
    if not given or given[-1] != weight[1]:
        return None
    rows = prod(given[:-1])
    return 2.0 * rows * weight[0] * weight[1], float(rows * weight[0])


def _convolution_backward(shapes: Shapes) -> Counted | None:
    """Inputs: gradient of the output, input, weight. Both gradients cost what forward does."""
    gradient, given, weight = shapes[0], shapes[1], shapes[2]
    forward = convolution(given, gradient, weight)
    return None if forward is None else (2 * forward, float(prod(given) + prod(weight)))


def _cudnn_convolution_backward(shapes: Shapes) -> Counted | None:
    """Before 1.11: input, gradient of the output, weight."""
    return _convolution_backward((shapes[1], shapes[0], shapes[2]))


def convolution(given: Shape, output: Shape, weight: Shape) -> float | None:
    """Forward FLOPs of a convolution from input to output.

    A transposed one, whose weight begins with the channels of the input, takes every element of
    the input as often as a plain one makes one of the output.
    """
    if len(output) < 3 or not len(given) == len(weight) == len(output):
        return None
    transposed = weight[0] == given[1] != output[1]
    return 2.0 * prod(given if transposed else output) * prod(weight[1:])


def _attention(shapes: Shapes) -> Counted | None:
    """Query, key, value: (batch, heads, length, head)."""
    (b, h, s, d), (_, _, t, _) = _rank(shapes[0], 4), _rank(shapes[1], 4)
    return 4.0 * b * h * s * t * d, float(b * h * s * d)


def _attention_backward(shapes: Shapes) -> Counted | None:
    """Gradient of the output, query, key, value."""
    forward = _attention(shapes[1:])
    if forward is None:
        return None
    return 2.5 * forward[0], float(sum(prod(shape) for shape in shapes[1:4]))


def _rank(shape: Shape, dimensions: int) -> Shape:
    if len(shape) != dimensions:
        raise IndexError(shape)
    return shape


_FORMULAS: dict[str, tuple[KernelClass, Callable[[Shapes], Counted | None]]] = {
    "aten::mm": ("gemm", _mm),
    "aten::addmm": ("gemm", _addmm),
    "aten::_addmm_activation": ("gemm", _addmm),
    "aten::bmm": ("gemm", _bmm),
    "aten::baddbmm": ("gemm", _baddbmm),
    "aten::linear": ("gemm", _linear),
    "aten::_scaled_mm": ("gemm", _mm),
    "aten::convolution_backward": ("convolution", _convolution_backward),
    "aten::cudnn_convolution_backward": ("convolution", _cudnn_convolution_backward),
    "aten::_scaled_dot_product_flash_attention": ("attention", _attention),
    "aten::_scaled_dot_product_efficient_attention": ("attention", _attention),
    "aten::_scaled_dot_product_cudnn_attention": ("attention", _attention),
    "aten::_scaled_dot_product_flash_attention_for_cpu": ("attention", _attention),
    "aten::scaled_dot_product_attention": ("attention", _attention),
    "aten::_scaled_dot_product_flash_attention_backward": ("attention", _attention_backward),
    "aten::_scaled_dot_product_efficient_attention_backward": ("attention", _attention_backward),
    "aten::_scaled_dot_product_cudnn_attention_backward": ("attention", _attention_backward),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (
        "attention",
        _attention_backward,
    ),
}
# Their output's shape is in no argument: it is known where the backward call has its gradient.
CONVOLUTIONS = frozenset({"aten::convolution"})


def gradient_of_convolution(name: str, shapes: Shapes) -> tuple[Shape, Shape, Shape] | None:
    """Input, weight and gradient of the output, from the backward call of a convolution."""
    if name == "aten::convolution_backward" and len(shapes) > 2:
        return shapes[1], shapes[2], shapes[0]
    if name == "aten::cudnn_convolution_backward" and len(shapes) > 2:
        return shapes[0], shapes[2], shapes[1]
    return None


def convolution_work(shapes: Shapes, output: Shape, types: Sequence[str]) -> Work | None:
    """Of a forward call with the inputs ``shapes`` and a known shape of the output."""
    flops = convolution(shapes[0], output, shapes[1])
    return None if flops is None else _work("convolution", shapes, types, (flops, prod(output)))
