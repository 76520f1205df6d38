"""Finds devices that are busy with kernels that move memory instead of computing."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_diagnosis.intervals import Intervals, total
from warpwatch_diagnosis.measures.gpu_work import ClassTime, KernelClass
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.roofline import MEMORY_CLASSES, ClassRoofline
from warpwatch_diagnosis.rules.base import RankRule
from warpwatch_diagnosis.words import milliseconds, percent, short, times

# The share of memory-bound kernels in the compute (reference values of this project).
MIN_SHARE_OF_COMPUTE = 0.50
HIGH_SHARE_OF_COMPUTE = 0.70
# If the device waits more, for the host or for other ranks, the waiting comes first.
MIN_COMPUTE_SHARE = 0.80
# A product below the ridge is limited by memory only if it comes near the memory's bandwidth.
MIN_BANDWIDTH_RATIO = 0.50
# Fusing a chain of pointwise kernels saves at least every second pass over the memory: what a
# compiler wins on such chains, conservatively (our own value).
SAVED_BY_FUSION = 0.5
_SHOWN = 3


class MemoryBoundRule(RankRule):
    """Finds devices that compute all the time, limited by their memory."""

    kind = "memory_bound"
    needs_gpu = True

    def lost(self, measures: Measures) -> Intervals:
        """Return the compute, of which ``recoverable_us`` says how much can be saved."""
        return measures.gpu.compute if measures.gpu else []

    def share(self, measures: Measures, lost: Intervals) -> float:
        return measures.share_of_us(_moving_us(measures))

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        computes = measures.share(lost) > MIN_COMPUTE_SHARE
        return computes and _share_of_compute(measures, lost) > MIN_SHARE_OF_COMPUTE

    def is_sure(self, measures: Measures, lost: Intervals) -> bool:
        return _share_of_compute(measures, lost) > HIGH_SHARE_OF_COMPUTE

    def recoverable_us(self, measures: Measures, lost: Intervals) -> float:
        return SAVED_BY_FUSION * min(_moving_us(measures), total(lost))

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        classes = _moving(measures)
        named = {c.kernel_class for c in classes}
        by_class = [f"{c.kernel_class} {milliseconds(c.busy_us)}" for c in classes[: 2 * _SHOWN]]
        yield (
            f"{percent(_share_of_compute(measures, lost))} of the GPU's compute goes to kernels "
            "that move memory and hardly compute"
        )
        yield f"by class: {', '.join(by_class)}"
        kernels = measures.gpu.kernel_times if measures.gpu else ()
        for k in [k for k in kernels if k.kernel_class in named][:_SHOWN]:
            yield f"{short(k.name)} ran {times(k.count)} for {milliseconds(k.total_us)}"
        yield f"the GPU computes for {percent(measures.share(lost))} of the step"


def _moving(measures: Measures) -> list[ClassTime]:
    """Return classes that hardly compute, or that the roofline shows to be limited by memory."""
    known = {c.kernel_class: c for c in measures.roofline.classes} if measures.roofline else {}
    classes = measures.gpu.class_times if measures.gpu else ()
    return [c for c in classes if _moves(c.kernel_class, known.get(c.kernel_class))]


def _moves(kernel_class: KernelClass, known: ClassRoofline | None) -> bool:
    by_nature = kernel_class in MEMORY_CLASSES
    if known is None or known.bound is None or known.bandwidth_ratio is None:
        return by_nature
    return known.bound == "memory" and (by_nature or known.bandwidth_ratio > MIN_BANDWIDTH_RATIO)


def _moving_us(measures: Measures) -> float:
    return sum(c.busy_us for c in _moving(measures))


def _share_of_compute(measures: Measures, compute: Intervals) -> float:
    return min(1.0, _moving_us(measures) / total(compute)) if compute else 0.0
