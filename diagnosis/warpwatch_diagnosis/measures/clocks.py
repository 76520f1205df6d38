"""Whether one device runs the same kernels slower than another, all by one factor.

The same kernel is one of the same name and grid: a name alone mixes sizes (forward and backward),
and how many of each lie in the window depends on how far the host leads. So only what the steps
launched counts, whenever it ran.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

from warpwatch_diagnosis.measures.intervals import Interval
from warpwatch_diagnosis.measures.kernels import classify
from warpwatch_diagnosis.trace.events import Event

# Kernels of the same clock differ by less from run to run; the ratio of all of them does not
# spread more when the clock is the reason (reference values of this project).
MIN_SLOWDOWN = 1.05
MAX_SPREAD = 0.03
# Of the time in kernels, what must agree on the factor (our own value).
MIN_AGREEING_SHARE = 0.70

# Name and grid; () where the trace has no grid.
Size = tuple[str, tuple[object, ...]]


@dataclass(frozen=True, slots=True)
class SizeTime:
    """All kernels of one name and grid that the window launched; collectives are left out."""

    count: int
    total_us: float
    median_us: float


def size_times(
    kernels: Sequence[Event], calls: Mapping[int | None, Event], window: Interval
) -> dict[Size, SizeTime]:
    """``kernels``: all of the trace. One whose launch is unknown counts where it begins."""
    low, high = window
    found: dict[Size, list[float]] = defaultdict(list)
    for kernel in kernels:
        launched = calls.get(kernel.correlation, kernel)
        if low <= launched.begin_us < high and classify(kernel.name) != "communication":
            found[_size(kernel)].append(kernel.end_us - kernel.begin_us)
    return {
        size: SizeTime(len(durations), sum(sorted(durations)), median(durations))
        for size, durations in found.items()
    }


def _size(kernel: Event) -> Size:
    grid = kernel.arguments.get("grid") if kernel.arguments else None
    known = isinstance(grid, list) and all(isinstance(blocks, int) for blocks in grid)
    return kernel.name, tuple(grid) if known and grid else ()


def slowdown(now: Mapping[Size, SizeTime], before: Mapping[Size, SizeTime]) -> float | None:
    """The factor that (nearly) all kernels are slower by; None if there is no such one.

    Their number does not matter: a slower device gets less far in the same time.
    """
    weight = sum(time.total_us for time in now.values())
    known = sorted(
        (time.median_us / before[size].median_us, time.total_us)
        for size, time in now.items()
        if size in before and before[size].median_us
    )
    if not weight or sum(us for _, us in known) < MIN_AGREEING_SHARE * weight:
        return None
    factor = _weighted_median(known)
    agreeing = sum(us for ratio, us in known if abs(ratio / factor - 1) <= MAX_SPREAD)
    return factor if factor >= MIN_SLOWDOWN and agreeing >= MIN_AGREEING_SHARE * weight else None


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Of sorted (value, weight)."""
    half = sum(weight for _, weight in values) / 2
    reached = accumulate(weight for _, weight in values)
    return next(value for (value, _), sofar in zip(values, reached, strict=True) if sofar >= half)
