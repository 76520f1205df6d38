"""The device is busy, but with kernels that move memory instead of computing."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.intervals import total
from warpwatch_diagnosis.measures.kernels import ClassTime, KernelClass
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.roofline import ClassRoofline
from warpwatch_diagnosis.rules.base import Finding, milliseconds, percent, short, times

# Of the compute, what must be memory-bound kernels (reference value of this project).
MIN_SHARE_OF_COMPUTE = 0.50
HIGH_SHARE_OF_COMPUTE = 0.70
# Where the device waits, for the host or for other ranks, the waiting comes first.
MIN_COMPUTE_SHARE = 0.80
# A product below the ridge is limited by memory only if it comes near the memory's bandwidth.
MIN_BANDWIDTH_RATIO = 0.50
# Fusing a chain of pointwise kernels saves at least every second pass over the memory: what a
# compiler wins on such chains, conservatively (our own value).
SAVED_BY_FUSION = 0.5
_SHOWN = 3
# At most some FLOP per element, whatever the shapes. What a compiler has fused already is not here.
_MOVING: frozenset[KernelClass] = frozenset(
    ("elementwise", "copy", "normalization", "softmax", "reduction", "optimizer", "indexing")
)


class MemoryBound:
    kind = "memory_bound"
    supersedes: tuple[str, ...] = ()

    def share(self, measures: Measures) -> float | None:
        return _share(measures, measures.gpu) if measures.gpu else None

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        return [
            _finding(self.kind, m, m.gpu)
            for m in capture
            if m.gpu is not None and _applies(m, m.gpu)
        ]


def _applies(measures: Measures, gpu: GpuTime) -> bool:
    return (
        measures.share(gpu.compute) > MIN_COMPUTE_SHARE
        and _share_of_compute(measures, gpu) > MIN_SHARE_OF_COMPUTE
    )


def _moving(measures: Measures, gpu: GpuTime) -> list[ClassTime]:
    """Classes that hardly compute, and those that the roofline proves to be limited by memory."""
    known = {c.kernel_class: c for c in measures.roofline.classes} if measures.roofline else {}
    return [c for c in gpu.class_times if _moves(c.kernel_class, known.get(c.kernel_class))]


def _moves(kernel_class: KernelClass, known: ClassRoofline | None) -> bool:
    if known is None or known.bound is None or known.bandwidth_ratio is None:
        return kernel_class in _MOVING
    reached = kernel_class in _MOVING or known.bandwidth_ratio > MIN_BANDWIDTH_RATIO
    return known.bound == "memory" and reached


def _time_us(measures: Measures, gpu: GpuTime) -> float:
    return sum(c.busy_us for c in _moving(measures, gpu))


def _share(measures: Measures, gpu: GpuTime) -> float:
    return min(1.0, _time_us(measures, gpu) / measures.window_us) if measures.window_us else 0.0


def _share_of_compute(measures: Measures, gpu: GpuTime) -> float:
    compute_us = total(gpu.compute)
    return min(1.0, _time_us(measures, gpu) / compute_us) if compute_us else 0.0


def _finding(kind: str, measures: Measures, gpu: GpuTime) -> Finding:
    of_compute = _share_of_compute(measures, gpu)
    spent_us = min(_time_us(measures, gpu), total(gpu.compute))
    return Finding(
        kind=kind,
        rank=measures.rank,
        label=measures.label,
        share=_share(measures, gpu),
        recoverable_s=SAVED_BY_FUSION * spent_us / 1e6,
        confidence="high" if of_compute > HIGH_SHARE_OF_COMPUTE else "medium",
        evidence=tuple(_evidence(measures, gpu, of_compute)),
        advice=(
            "Let torch.compile(model) fuse the pointwise and normalisation kernels, train in "
            "bfloat16 (torch.autocast) so that they move half the bytes, use a fused optimizer "
            "(fused=True), channels_last for convolutions and scaled_dot_product_attention."
        ),
    )


def _evidence(measures: Measures, gpu: GpuTime, of_compute: float) -> list[str]:
    classes = _moving(measures, gpu)
    named = {c.kernel_class for c in classes}
    sentences = [
        f"{percent(of_compute)} of the GPU's compute goes to kernels that move memory and hardly "
        "compute",
        "by class: "
        + ", ".join(f"{c.kernel_class} {milliseconds(c.busy_us)}" for c in classes[: 2 * _SHOWN]),
    ]
    top = [k for k in gpu.kernel_times if k.kernel_class in named][:_SHOWN]
    sentences += [
        f"{short(k.name)} ran {times(k.count)} for {milliseconds(k.total_us)}" for k in top
    ]
    sentences.append(f"the GPU computes for {percent(measures.share(gpu.compute))} of the step")
    return sentences
