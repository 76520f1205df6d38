"""The median of a signal's last values, looked at only when it can have passed a guard.

As long as less than half of the values are above the guard, the median is not: that takes two
comparisons a value and no order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from warpwatch_detection.detector import NEVER
from warpwatch_detection.signals.sliding_median import median_of_ordered

# √(π/2) deviations over √n; a normal distribution's quartiles are 1.349 deviations apart.
MEDIAN_ERROR = 1.2533 / 1.349


class Middle(NamedTuple):
    """upper_quartile: what a quarter of the values reach.

    error: standard error of the median, were the values independent and about normal.
    """

    median: float
    upper_quartile: float
    error: float


@dataclass(slots=True)
class GuardedMedian:
    """values: as they came, -inf for each that is not known yet; above: how many pass ``guard``."""

    values: list[float]
    guard: float = NEVER
    above: int = 0

    @classmethod
    def of_size(cls, size: int) -> GuardedMedian:
        return cls([-NEVER] * size)

    @property
    def full(self) -> bool:
        return self.values[0] > -NEVER

    def add(self, value: float) -> None:
        values, guard = self.values, self.guard
        values.append(value)
        if value > guard:
            self.above += 1
        if values.pop(0) > guard:
            self.above -= 1

    def watch(self, guard: float) -> None:
        """From now on ``above`` counts those above ``guard``."""
        self.guard = guard
        self.above = len([value for value in self.values if value > guard])

    def clear(self) -> None:
        self.values = [-NEVER] * len(self.values)
        self.above = 0

    def median(self) -> float:
        return median_of_ordered(sorted(self.values))

    def middle(self) -> Middle:
        """Of a full window."""
        ordered, count = sorted(self.values), len(self.values)
        upper_quartile = ordered[count * 3 // 4]
        error = MEDIAN_ERROR * (upper_quartile - ordered[count // 4]) / count**0.5
        return Middle(median_of_ordered(ordered), upper_quartile, error)
