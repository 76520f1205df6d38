"""The newest samples of a signal: how far is each window of them from those before it?"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

# Samples of each window: about 1.5 times the one before; 140 still ends within 150 steps.
WINDOWS = (12, 16, 24, 40, 60, 100, 140)
SHORTEST, LONGEST = WINDOWS[0], WINDOWS[-1]
# Samples before the window that it is compared with, and the least of them.
REFERENCE = 200
MIN_REFERENCE = 40
KEPT = LONGEST + REFERENCE
# A window is looked at five times in its length; which are due repeats after PERIOD samples.
LOOKS = 5
PERIOD = math.lcm(*(window // LOOKS for window in WINDOWS))
DUE = tuple(
    tuple(window for window in WINDOWS if count % (window // LOOKS) == 0) for count in range(PERIOD)
)
# A level is the mean between these quantiles: what a network or a neighbour does to steps makes
# them longer, hardly ever shorter, so fast steps vary by half of what the middle ones do.
TRIM = (0.05, 0.35)
# The shortest window whose rise may be clear: 6 s at least.
CLEAR_WINDOW = 60
# The usual change from one sample to the next is learned over so many of them; what is above so
# many times the mean counts as that.
CHANGE_SAMPLES = 500
CHANGE_CUT = 4.0
CHANGE_CUT_AFTER = 20


@cache
def counted(values: int) -> slice:
    """Which of so many values in order count: those between two quantiles, one at least."""
    low, high = TRIM
    first = int(values * low)
    return slice(first, max(first + 1, int(values * high)))


def trimmed_mean(ordered: Sequence[float]) -> float:
    counting = ordered[counted(len(ordered))]
    return sum(counting) / len(counting)


def level(values: Sequence[float]) -> float:
    return trimmed_mean(sorted(values))


@dataclass(slots=True)
class ReferenceLevels:
    """Levels of the samples that windows are compared with.

    The same samples lie before a short window now and before a long one later. ordered: those
    before the shortest window; levels: theirs, the newest last.
    """

    ordered: list[float] = field(default_factory=list)
    levels: list[float] = field(default_factory=list)

    def add(self, values: Sequence[float]) -> None:
        """``values`` has got its newest one."""
        ordered, known = self.ordered, len(values) - SHORTEST
        if known <= 0:
            return
        insort(ordered, values[-1 - SHORTEST])
        if known > REFERENCE:
            del ordered[bisect_left(ordered, values[-1 - SHORTEST - REFERENCE])]
        if known >= MIN_REFERENCE:
            self.levels.append(trimmed_mean(ordered))
        if len(self.levels) >= KEPT:
            del self.levels[:-LONGEST]

    def before(self, window: int) -> float:
        """The level before a window of so many samples, if MIN_REFERENCE lie before it."""
        return self.levels[SHORTEST - window - 1]


@dataclass(slots=True)
class SignalHistory:
    """``values``: the newest, at most two windows and references. count: of all samples.

    change: mean of |difference| of neighbouring ones.
    """

    count: int = 0
    values: list[float] = field(default_factory=list)
    references: ReferenceLevels = field(default_factory=ReferenceLevels)
    change: float = 0.0

    def add(self, value: float) -> None:
        values = self.values
        self.count += 1
        if values:
            self._learn_change(abs(value - values[-1]))
        values.append(value)
        if self.count % KEPT == 0:
            del values[:-KEPT]
        self.references.add(values)

    def differences(self, least_window: int) -> Iterator[tuple[int, float]]:
        """The windows that are due now, each with its level over that of the samples before it."""
        known = len(self.values) - MIN_REFERENCE
        for window in DUE[self.count % PERIOD]:
            if least_window <= window <= known:
                newest = level(self.values[-window:])
                yield window, newest - self.references.before(window)

    def is_clear_rise(self, window: int) -> bool:
        """Whether three quarters of a long window lie above three quarters of what was before."""
        if window < CLEAR_WINDOW:
            return False
        newest = sorted(self.values[-window:])
        before = sorted(self.values[-window - REFERENCE : -window])
        return newest[window // 4] > before[len(before) * 3 // 4]

    def since(self, samples: int) -> SignalHistory:
        """What is left when all but the newest ``samples`` are forgotten."""
        left = SignalHistory(self.count, change=self.change)
        for value in self.values[-samples:]:
            left.values.append(value)
            left.references.add(left.values)
        return left

    def _learn_change(self, change: float) -> None:
        """A slow step is two large changes: cut, once it is known what is large."""
        if self.count > CHANGE_CUT_AFTER:
            change = min(change, CHANGE_CUT * self.change)
        self.change += (change - self.change) / min(self.count, CHANGE_SAMPLES)


def scale_of(window: int, before: int) -> float:
    """A reference of ``before`` samples is noisier than a whole one by this."""
    return math.sqrt((1 / window + 1 / before) / (1 / window + 1 / REFERENCE))
