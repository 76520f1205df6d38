"""Kernels by name and by class.

The class comes from the kernel's name alone: PyTorch's own kernels, those of cuBLAS, cuDNN,
CUTLASS, NCCL, rocBLAS, MIOpen, FlashAttention, Apex, Transformer Engine and Inductor's Triton.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from statistics import median
from typing import Literal, NamedTuple

from warpwatch_diagnosis.measures.intervals import Interval, total, union
from warpwatch_diagnosis.trace.events import MAX_NUMBER, Event

KernelClass = Literal[
    "gemm", "convolution", "attention", "normalization", "softmax", "elementwise", "reduction",
    "optimizer", "indexing", "copy", "communication", "triton_fused", "other",
]  # fmt: skip

# Names of templates grow to many kB; what matters stands at their begin.
MAX_NAME = 2_000
TOP = 20
# A kernel shorter than this does less work than its launch (TraceLens).
SHORT_KERNEL_US = 10.0
# The first pattern that is found in the name decides.
_PATTERNS: tuple[tuple[KernelClass, str], ...] = (
    # NCCL, RCCL (whose kernels are named ncclDevKernel_*), oneCCL, HCCL, MSCCL++, NVSHMEM,
    # DeepEP; PyTorch's symmetric memory and vLLM's own all-reduce.
    (
        "communication",
        r"(?i)nccl|rccl|oneccl|hccl|nvshmem|deep_ep::|(one|two)_shot_all_?reduce"
        r"|multimem_(all|one|reduce)|cross_device_reduce",
    ),
    (
        "attention",
        r"(?i)flash|fmha|attention|attn_(fwd|bwd)|_attn|\bmha_|sdpa|paged_kv|splitkv"
        r"|flex_attn",
    ),
    ("gemm", r"^triton_tem_|^triton_.*_(mm|bmm|addmm)_"),
    ("triton_fused", r"^triton_"),
    (
        "optimizer",
        r"(?i)multi_tensor_apply|multi_?tensor_?(adam|lamb|sgd|scale)|fused_?(adam|sgd|lamb)"
        r"|FusedOptimizer|adam_cuda_kernel|kOptimizer|blockwise_optimizer",
    ),
    (
        "convolution",
        r"(?i)cudnn_(infer_|train_)?\d+x\d+|cudnn_winograd|fft2d_|convolution|convolve|implicit_?gemm|winograd|[dw]grad|_fprop|fprop_|cask_cudnn"
        r"|conv(_depthwise)?[123]d|depthwise|cudnn::cnn::|im2col|col2im|col2vol|vol2col"
        r"|igemm_(fwd|bwd|wrw)|Sp3AsmConv|AsmConv|\bconv_|_conv_",
    ),
    (
        "copy",
        r"(?i)direct_copy|CatArray|nchwToNhwc|nhwcToNchw|transpose_|_transpose|permute"
        r"|copy_(async_)?kernel|copy_device_to_device|(b?float16|half|float8\w*)_copy|chunk_cat"
        r"|split_with_sizes_copy|tensorTransform|batch_transpose|__amd_rocclr_copy",
    ),
    (
        "gemm",
        r"gemm|Gemm|GEMM|gemv|cutlass|cublas|Cijk_|splitKreduce|splitK|nvjet|rocblas|hipblas"
        r"|wgmma|xmma|tensorop|matmul|_mm_kernel|dot_kernel|gett|Gett",
    ),
    (
        "normalization",
        r"(?i)(layer|batch|group|instance|rms)_?norm|bn_(fw|bw)|RowwiseMoments|GammaBeta"
        r"|ComputeInternalGradients|ComputeFusedParams|GroupNorm|::ln_(fwd|bwd)|ln_(fwd|bwd)_",
    ),
    ("softmax", r"(?i)soft_?max|cross_entropy|xentropy"),
    (
        "indexing",
        r"(?i)embedding|index_|index(Func|Select|ing)|_index|gather|scatter|krn_partial"
        r"|compute_grad_weight|radix|sort|topk|unique|DeviceScan|DeviceSelect|DeviceCompact"
        r"|scan_|bincount|histogram|nonzero|sum_and_scatter|compute_num_of_partial",
    ),
    (
        "reduction",
        r"reduce_kernel|Reduce|reduce_|_reduce|nll_loss|NLLLoss|norm_kernel|cunn_.*Criterion",
    ),
    (
        "elementwise",
        r"elementwise|unrolled|Functor|pointwise|Pointwise|dropout|distribution|[Gg]elu|[Rr]elu"
        r"|silu|swiglu|rotary|rope|activation|op_tensor|OpTensor|scalePacked|random_from_to"
        r"|philox|triu_tril|where_kernel|fill_kernel|vectorized",
    ),
)
_CLASSES = tuple((known, re.compile(pattern)) for known, pattern in _PATTERNS)


def classify(name: str) -> KernelClass:
    """By the name of the kernel; ``other`` if nothing is known."""
    return _classify(name[:MAX_NAME])


@lru_cache(maxsize=16_384)
def _classify(name: str) -> KernelClass:
    return next((known for known, pattern in _CLASSES if pattern.search(name)), "other")


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All kernels of one name. Sums of durations (not unions), clipped to the window.

    blocks_per_sm, occupancy_ratio: means weighted by duration as the profiler estimated them,
    None where it did not.
    """

    name: str
    kernel_class: KernelClass
    count: int
    total_us: float
    median_us: float
    longest_us: float
    blocks_per_sm: float | None
    occupancy_ratio: float | None


@dataclass(frozen=True, slots=True)
class ClassTime:
    """All kernels of one class. ``total_us``: sum of durations; ``busy_us``: their union.

    short_count: those under gpu_time.SHORT_KERNEL_US. underfilled_us: time in kernels with less
    than one block per SM. blocks_per_sm, occupancy_ratio: as in KernelTime.
    """

    kernel_class: KernelClass
    count: int
    total_us: float
    busy_us: float
    short_count: int
    underfilled_us: float
    blocks_per_sm: float | None
    occupancy_ratio: float | None


# Begin, end and µs in the window; whole µs; blocks per SM and occupancy in % as estimated.
_Row = tuple[float, float, float, float, float | None, float | None]


class _Columns(NamedTuple):
    """Kernels as columns of _Row."""

    begins: Sequence[float]
    ends: Sequence[float]
    spent: Sequence[float]
    durations: Sequence[float]
    blocks: Sequence[float | None]
    occupancies: Sequence[float | None]


def kernel_times(
    kernels: Sequence[Event], window: Interval
) -> tuple[tuple[KernelTime, ...], tuple[ClassTime, ...]]:
    """The TOP names that take most time and every class that occurs, longest first.

    ``kernels``: in the window, by their begin.
    """
    rows = _rows(kernels, window)
    named = {name: _Columns(*zip(*found, strict=True)) for name, found in rows.items()}
    top = sorted(named, key=lambda name: (-sum(named[name].spent), name))[:TOP]
    classes: dict[KernelClass, list[_Columns]] = defaultdict(list)
    for name, columns in named.items():
        classes[classify(name)].append(columns)
    times = [_class_time(found, _together(several)) for found, several in classes.items()]
    return (
        tuple(_kernel_time(name, named[name]) for name in top),
        tuple(sorted(times, key=lambda t: (-t.total_us, t.kernel_class))),
    )


def _together(several: list[_Columns]) -> _Columns:
    return _Columns(*(list(chain.from_iterable(column)) for column in zip(*several, strict=True)))


def _rows(kernels: Sequence[Event], window: Interval) -> dict[str, list[_Row]]:
    low, high = window
    named: dict[str, list[_Row]] = defaultdict(list)
    # Equal arguments are one object.
    estimates: dict[int, tuple[float | None, float | None]] = {}
    for kernel in kernels:
        name, begin, end, _, _, arguments = kernel
        known = estimates.get(id(arguments))
        if known is None:
            known = number(kernel, "blocks per SM"), number(kernel, "est. achieved occupancy %")
            estimates[id(arguments)] = known
        us = end - begin
        begin = begin if begin > low else low
        end = end if end < high else high
        named[name].append((begin, end, end - begin, us, *known))
    return named


def _kernel_time(name: str, kernels: _Columns) -> KernelTime:
    spent = kernels.spent
    return KernelTime(
        name=name[:MAX_NAME],
        kernel_class=classify(name),
        count=len(spent),
        total_us=math.fsum(spent),
        median_us=median(spent),
        longest_us=max(spent),
        blocks_per_sm=_mean(kernels.blocks, spent),
        occupancy_ratio=_ratio(_mean(kernels.occupancies, spent)),
    )


def _class_time(kernel_class: KernelClass, kernels: _Columns) -> ClassTime:
    spent, blocks = kernels.spent, kernels.blocks
    return ClassTime(
        kernel_class=kernel_class,
        count=len(spent),
        total_us=math.fsum(spent),
        busy_us=total(union(zip(kernels.begins, kernels.ends, strict=True))),
        short_count=sum([us < SHORT_KERNEL_US for us in kernels.durations]),
        underfilled_us=math.fsum(
            [us for value, us in zip(blocks, spent, strict=True) if value is not None and value < 1]
        ),
        blocks_per_sm=_mean(blocks, spent),
        occupancy_ratio=_ratio(_mean(kernels.occupancies, spent)),
    )


def _mean(values: Sequence[float | None], spent: Sequence[float]) -> float | None:
    """Weighted by duration, over the kernels that have a value."""
    known = [(value * us, us) for value, us in zip(values, spent, strict=True) if value is not None]
    weight = math.fsum([us for _, us in known])
    return math.fsum([product for product, _ in known]) / weight if weight else None


def _ratio(percentage: float | None) -> float | None:
    return None if percentage is None else min(1.0, max(0.0, percentage / 100))


def number(event: Event, key: str) -> float | None:
    """An argument of the event as a not negative number below MAX_NUMBER."""
    value = event.arguments.get(key) if event.arguments else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value < MAX_NUMBER else None
