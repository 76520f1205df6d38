"""The trend of a level: a robust slope, where it began to rise, and whether all of it rose."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import median

from warpwatch_detection.signals.medians import SIGMA_PER_MAD

# Growth counts above this part of the level, and above so many times the scatter about the line.
# Two segments of 20 MB of PyTorch's allocator and some, within a window.
MIN_GROWTH_BYTES = 64e6
MIN_GROWTH_RATIO = 0.005
NOISE_FACTOR = 5.0
# Parts of the window that must all grow, each by this part of an even share.
PARTS = 6
MIN_PART = 0.25
# A cache that fills slows down, what leaks does not: least growth of the end against the begin.
MIN_LATE = 0.7


@dataclass(slots=True)
class GrowthPoint:
    """``value`` of a block at ``step`` (the block's first) and ``time``.

    left: what was left of the memory then, -1 if it is not known.
    """

    step: int
    time: float
    value: float
    left: float = -1.0


@dataclass(slots=True)
class Trend:
    """Growth a step over a window, in the value's unit; ``limit`` is the least that counts.

    steps_per_s: how fast the job went through the window. excess: growth over its limit, which
    says something only where every part of the window grew.
    """

    slope: float = 0.0
    limit: float = 0.0
    excess: float = 0.0
    steps_per_s: float = 0.0


def trend(points: list[GrowthPoint]) -> Trend:
    """How the level moved over a full window."""
    first, last = points[0], points[-1]
    steps, seconds = max(1, last.step - first.step), last.time - first.time
    slope = theil_sen(points)
    offsets = [point.value - slope * (point.step - first.step) for point in points]
    base = median(offsets)
    noise = SIGMA_PER_MAD * median([abs(offset - base) for offset in offsets])
    least = max(MIN_GROWTH_BYTES, MIN_GROWTH_RATIO * abs(base), NOISE_FACTOR * noise)
    pace = steps / seconds if seconds > 0 else 0.0
    excess = slope * steps / least if least > 0 else 0.0
    return Trend(slope, least / steps, excess, pace)


def begin_of(points: list[GrowthPoint]) -> int:
    """Return the step at which the newer half's line meets the level of the first points."""
    newer = points[len(points) // 2 :]
    slope = theil_sen(newer)
    if slope <= 0:
        return points[0].step
    level = median([point.value for point in points[:3]])
    offset = median([point.value - slope * (point.step - newer[0].step) for point in newer])
    begin = newer[0].step - (offset - level) / slope
    return round(min(max(begin, points[0].step), newer[0].step))


def theil_sen(points: list[GrowthPoint]) -> float:
    """Median of the slopes between all pairs: right with up to 29 % of outliers (Sen, 1968)."""
    pairs = combinations(points, 2)
    return median([(b.value - a.value) / (b.step - a.step) for a, b in pairs if b.step > a.step])


def every_part_grows(points: list[GrowthPoint]) -> bool:
    size = len(points) // PARTS
    values = [point.value for point in points[len(points) - size * PARTS :]]
    parts = [median(values[start : start + size]) for start in range(0, len(values), size)]
    total = parts[-1] - parts[0]
    if total <= 0:
        return False
    rises = [after - before for before, after in pairwise(parts)]
    if min(rises) < MIN_PART * total / len(rises):
        return False
    return sum(rises[-2:]) >= MIN_LATE * sum(rises[:2])
