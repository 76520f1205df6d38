"""The median of a signal's last values, kept in order: two binary searches a value."""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field


@dataclass(slots=True)
class SlidingMedian:
    """The last ``size`` values, as they came (a ring) and in order."""

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


def median_of_ordered(ordered: list[float]) -> float:
    count = len(ordered)
    middle = count // 2
    if count % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2
