"""Median and quartiles of a signal's last values, kept in order: two binary searches a value."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

# √(π/2) deviations over √n; a normal distribution's quartiles are 1.349 deviations apart.
MEDIAN_ERROR = 1.2533 / 1.349


@dataclass(slots=True)
class SlidingMedian:
    """The last ``size`` values, as they came (a ring) and in order."""

    size: int
    recent: list[float] = field(default_factory=list)
    ordered: list[float] = field(default_factory=list)
    oldest: int = 0

    @property
    def full(self) -> bool:
        return len(self.recent) >= self.size

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

    def median(self) -> float:
        """Of at least one value."""
        return median_of_ordered(self.ordered)

    def upper_quartile(self) -> float:
        """What a quarter of the values reach."""
        return self.ordered[len(self.ordered) * 3 // 4]

    def median_error(self) -> float:
        """Standard error of the median, were the values independent and about normal."""
        count = len(self.ordered)
        quartiles = self.ordered[count * 3 // 4] - self.ordered[count // 4]
        return float(MEDIAN_ERROR * quartiles / count**0.5)

    def clear(self) -> None:
        self.recent.clear()
        self.ordered.clear()
        self.oldest = 0


def median_of_ordered(ordered: list[float]) -> float:
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
