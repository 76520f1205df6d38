"""How long steps take, in a histogram of fixed size with bins of equal ratio.

As DDSketch (Masson, Rim and Lee 2019) has them: a percentile is right to a part of itself, however
the values are spread.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping

# A bin's upper edge by its lower one: a percentile is right to 1 %.
GROWTH = 1.02
LEAST_S = 1e-4
# Up to a day.
BINS = math.ceil(math.log(86400.0 / LEAST_S) / math.log(GROWTH)) + 1
_SCALE = 1 / math.log(GROWTH)


class StepHistogram:
    """8 kB. ``counts``: as the property of the same name gives them."""

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self._bins = array("Q", bytes(8 * BINS))
        self.count = 0
        for number, count in (counts or {}).items():
            if 0 <= number < BINS and 0 < count < 2**48:
                self._bins[number] = count
                self.count += count

    def add(self, duration_s: float) -> None:
        number = int(math.log(max(duration_s, LEAST_S) / LEAST_S) * _SCALE)
        self._bins[min(number, BINS - 1)] += 1
        self.count += 1

    @property
    def counts(self) -> dict[int, int]:
        """By the number of the bin, which begins at LEAST_S · GROWTH ** number."""
        return {number: count for number, count in enumerate(self._bins) if count}

    def percentile(self, share: float) -> float | None:
        """What ``share`` (0 to 1) of the steps do not exceed, in seconds; None without steps."""
        left = share * self.count
        for number, count in enumerate(self._bins):
            if count and left <= count:
                return LEAST_S * math.exp((number + 0.5) / _SCALE)
            left -= count
        return None
