"""Medians: of a few values without one, and of the last values of a signal."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

# A normal distribution's standard deviation over its median absolute deviation.
SIGMA_PER_MAD = 1.4826
# The median of n normal values varies by √(π/2) deviations over √n; the quartiles of a normal
# distribution are 1.349 deviations apart.
ERROR_PER_QUARTILES = 1.2533 / 1.349


def medians_without_one(ordered: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the middle value, and the medians without a value below, at and above it.

    There are two values at least. All values below the middle leave the same median, and so do all
    above it.
    """
    half, is_even = divmod(len(ordered) - 1, 2)
    middle, above = ordered[half], ordered[half + 1]
    if is_even:
        return middle, above, above, middle
    below = ordered[half - 1]
    return middle, (middle + above) / 2, (below + above) / 2, (below + middle) / 2


def median_of_others(ordered: Sequence[float], own: float) -> float:
    """Without one of the values, ``own``; infinite where there is no other."""
    if len(ordered) < 2:
        return math.inf
    middle, of_lower, of_middle, of_upper = medians_without_one(ordered)
    return of_lower if own < middle else of_upper if own > middle else of_middle


@dataclass(slots=True)
class SlidingMedian:
    """The last ``size`` values, as they came (a ring) and in order: two binary searches a value."""

    size: int
    recent: list[float] = field(default_factory=list)
    ordered: list[float] = field(default_factory=list)
    oldest: int = 0

    def add(self, value: float) -> None:
        recent, ordered = self.recent, self.ordered
        if len(recent) < self.size:
            recent.append(value)
        else:
            oldest = self.oldest
            del ordered[bisect_left(ordered, recent[oldest])]
            recent[oldest] = value
            self.oldest = (oldest + 1) % self.size
        insort(ordered, value)

    def clear(self) -> None:
        self.recent.clear()
        self.ordered.clear()
        self.oldest = 0

    @property
    def newest(self) -> float:
        return self.recent[self.oldest - 1]

    @property
    def full(self) -> bool:
        return len(self.recent) == self.size

    def median(self) -> float:
        ordered = self.ordered
        half = len(ordered) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2

    def upper_quartile(self) -> float:
        """Return the upper quartile."""
        return self.ordered[len(self.ordered) * 3 // 4]

    def error(self) -> float:
        """Return the median's standard error, for independent and about normal values."""
        count = len(self.ordered)
        lower_quartile = self.ordered[count // 4]
        return ERROR_PER_QUARTILES * (self.upper_quartile() - lower_quartile) / math.sqrt(count)
