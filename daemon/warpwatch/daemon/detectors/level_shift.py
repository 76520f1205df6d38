"""Has the level of a noisy signal shifted? Asked in windows of several lengths at once.

A large shift shows in a few samples, a small one needs many. For each window length the mean of
the newest samples is compared with that of up to ``REFERENCE`` samples before them, and the
difference with the differences that the same job showed in health at the same length: so
autocorrelation and slow wandering are paid for where they weigh (docs/detection.md).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

from warpwatch.daemon.config.detectors_steps import ShiftConfig

# Samples of each window: about 1.5 times the one before; 140 still ends within 150 steps.
WINDOWS = (12, 16, 24, 40, 60, 100, 140)
# Samples before the window that it is compared with, and the least of them.
REFERENCE = 200
MIN_REFERENCE = 40
KEPT = WINDOWS[-1] + REFERENCE
# A window is looked at five times in its length: whenever the count of samples is a multiple of
# this. Which windows are due repeats after PERIOD samples.
LOOKS = 5
PACES = tuple(window // LOOKS for window in WINDOWS)
PERIOD = math.lcm(*PACES)
DUE = tuple(
    tuple(index for index, pace in enumerate(PACES) if count % pace == 0) for count in range(PERIOD)
)
# Up to this length a window is judged by its fast steps, which a few slow ones do not move.
SHORT_WINDOW = 40
SHORT_TRIM = (0.1, 0.45)
LONG_TRIM = (0.2, 0.8)
# The counts of samples (of a period) behind which a short or a long window will be looked at.
SHORT_DUE, LONG_DUE = (
    frozenset(
        (count - window) % PERIOD
        for window, pace in zip(WINDOWS, PACES, strict=True)
        for count in range(0, PERIOD, pace)
        if (window <= SHORT_WINDOW) == is_short
    )
    for is_short in (True, False)
)
# Differences to learn a window's noise from: at least, and as many as lie in so many samples.
MIN_LEARNED = 3
# Differences that wait: a window's length in long windows, half of it in short ones.
LONG_WAITING = 2
SHORT_WAITING = 1
MEMORY_SAMPLES = 2000
MEMORY_COUNTS = (12, 60)
# Noise of short windows is heavier in the tails than normal: standard deviations more for each
# halving below 40 samples, where the central limit theorem has not done its work yet.
TAIL_DEVIATIONS = 1.0
TAIL_SAMPLES = 40
# No step time is steadier than this (near-constant series have no noise to learn).
MIN_DEVIATION = 0.002
# Neighbouring samples of independent normal noise differ by 2 sigma / sqrt(pi) in the mean.
SIGMA_PER_CHANGE = math.sqrt(math.pi) / 2
# It is learned over so many samples; what is above so many times the mean counts as that.
CHANGE_SAMPLES = 500
CHANGE_CUT = 4.0
CHANGE_CUT_AFTER = 20
# A trimmed mean's standard deviation over that of the mean: 8 to 18 % more for normal noise.
TRIM_LOSS = 1.1
# The memory of past excursions fades over so many samples.
PEAK_SAMPLES = 4000


@dataclass(slots=True)
class WindowNoise:
    """How a window's difference varied in health. Variance about zero, of ``count`` differences.

    deviation: its root. waiting: the newest differences, learned later when no shift has
    followed; so a slow rise does not teach its own limit. peak: the largest that was learned.
    """

    count: int = 0
    variance: float = 0.0
    deviation: float = 0.0
    peak: float = 0.0
    waiting: list[float] = field(default_factory=list)

    def learn(self, difference: float, window: int) -> None:
        """Every half window: takes in the difference that has waited long enough."""
        if len(self.waiting) == (SHORT_WAITING if window <= SHORT_WINDOW else LONG_WAITING):
            healthy = self.waiting.pop(0)
            low, high = MEMORY_COUNTS
            most = max(low, min(high, 2 * MEMORY_SAMPLES // window))
            self.count = min(self.count + 1, most)
            self.variance += (healthy * healthy - self.variance) / self.count
            self.deviation = math.sqrt(self.variance)
            self.peak = max(self.peak * (1 - window / PEAK_SAMPLES), abs(healthy))
        self.waiting.append(difference)


@dataclass(slots=True)
class Shift:
    """A level that changed: from ``before`` by ``difference``, seen in ``window`` samples."""

    before: float
    difference: float
    limit: float
    window: int


@dataclass(slots=True)
class References:
    """Levels of the samples that windows are compared with, worked out once for all windows.

    The same samples lie before a short window now and before a long one later. ordered: those
    before the shortest window; short, long: levels for windows of either kind, by the count of
    samples when their newest came.
    """

    ordered: list[float] = field(default_factory=list)
    short: dict[int, float] = field(default_factory=dict)
    long: dict[int, float] = field(default_factory=dict)

    def add(self, values: Sequence[float], count: int) -> None:
        """``values`` has got its newest one, the ``count``-th of all."""
        ordered, shortest = self.ordered, WINDOWS[0]
        if len(values) > shortest:
            insort(ordered, values[-1 - shortest])
        if len(values) > shortest + REFERENCE:
            del ordered[bisect_left(ordered, values[-1 - shortest - REFERENCE])]
        if len(ordered) < MIN_REFERENCE:
            return
        end = count - shortest
        due = end % PERIOD
        if due in SHORT_DUE:
            self.short[end] = trimmed_mean(ordered, SHORT_TRIM)
        if due in LONG_DUE:
            self.long[end] = trimmed_mean(ordered, LONG_TRIM)
        self.short.pop(count - SHORT_WINDOW - 1, None)
        self.long.pop(count - WINDOWS[-1] - 1, None)

    def before(self, window: int, count: int) -> float | None:
        """The level before the newest ``window`` of ``count`` samples; None if they are few."""
        levels = self.short if window <= SHORT_WINDOW else self.long
        return levels.get(count - window)


def _noises() -> list[WindowNoise]:
    return [WindowNoise() for _ in WINDOWS]


@dataclass(slots=True)
class LevelShift:
    """``values``: since the last shift, at most two windows and references.

    change: mean of |difference| of neighbouring samples.
    difference: at the newest look whose noise is known; looked: its window's place in WINDOWS, -1
    before the first; scale: what its reference makes of the noise.
    nearest: the largest difference/limit so far.
    """

    values: list[float] = field(default_factory=list)
    references: References = field(default_factory=References)
    noises: list[WindowNoise] = field(default_factory=_noises)
    count: int = 0
    change: float = 0.0
    difference: float = 0.0
    looked: int = -1
    scale: float = 1.0
    nearest: float = 0.0

    def add(self, value: float, config: ShiftConfig, least_window: int = 1) -> Shift | None:
        """``least_window``: shorter windows are not judged. A shift, up or down, is told once."""
        values, references = self.values, self.references
        self.count = count = self.count + 1
        if values:
            self._learn_change(abs(value - values[-1]))
        values.append(value)
        if len(values) >= 2 * KEPT:
            del values[:-KEPT]
        references.add(values, count)
        for index in DUE[count % PERIOD]:
            window = WINDOWS[index]
            old = references.before(window, count)
            if old is None or window < least_window:
                continue
            if (shift := self._look(index, old, config)) is not None:
                self._restart(window)
                return shift
        return None

    def recent(self, samples: int) -> float:
        """The level of the newest ``samples``."""
        return level(self.values[-samples:])

    @property
    def ready(self) -> bool:
        return self.looked >= 0

    def limit(self, config: ShiftConfig) -> float:
        """Of ``difference``, by what is known now; infinite while that is nothing."""
        if not self.ready:
            return math.inf
        index, scale = self.looked, self.scale
        spread = scale * (self.deviation(config.alarm_rate, index) + MIN_DEVIATION)
        peak = scale * config.peak_factor * self.noises[index].peak
        return max(config.min_effect + config.cost_steps * (1 / WINDOWS[index]), spread, peak)

    def deviation(self, alarm_rate: float, index: int = len(WINDOWS) - 1) -> float:
        """What chance may do to a window's difference; infinite while nothing is known.

        The least that was learned of it and of shorter windows, whose means vary more. But no
        less than independent samples leave, which is known from many more of them.
        """
        window = WINDOWS[index]
        deviations = quantile_of(window, alarm_rate)
        learned = min(
            [
                student(deviations, noise.count) * noise.deviation
                for noise in self.noises[: index + 1]
                if noise.count >= MIN_LEARNED
            ],
            default=math.inf,
        )
        sigma = SIGMA_PER_CHANGE * self.change * TRIM_LOSS
        return max(learned, deviations * sigma * math.sqrt(1 / window + 1 / REFERENCE))

    def _look(self, index: int, old: float, config: ShiftConfig) -> Shift | None:
        window, noise = WINDOWS[index], self.noises[index]
        first, last = BOUNDS[index]
        difference = sum(sorted(self.values[-window:])[first:last]) / (last - first) - old
        before = len(self.values) - window
        scale = 1.0 if before >= REFERENCE else scale_of(window, before)
        if noise.count >= MIN_LEARNED:
            self.difference, self.looked, self.scale = difference, index, scale
            # Most differences are far below the part of the limit that is known at once.
            least = config.min_effect + config.cost_steps * (1 / window)
            if abs(difference) >= least or difference / least > self.nearest:
                limit = self.limit(config)
                self.nearest = max(self.nearest, difference / limit)
                if abs(difference) >= limit:
                    return Shift(old, difference, limit, window)
        if self.count % (window // 2) < PACES[index]:
            noise.learn(difference / scale, window)
        return None

    def _learn_change(self, change: float) -> None:
        """A slow step is two large changes: cut, once it is known what is large."""
        count, usual = self.count, self.change
        if change > CHANGE_CUT * usual and count > CHANGE_CUT_AFTER:
            change = CHANGE_CUT * usual
        self.change += (change - usual) / (count if count < CHANGE_SAMPLES else CHANGE_SAMPLES)

    def _restart(self, window: int) -> None:
        """What was learned of the noise stays; the old level goes."""
        kept = self.values[-(window // 2) :]
        self.values.clear()
        self.references = References()
        for count, value in enumerate(kept, self.count - len(kept) + 1):
            self.values.append(value)
            self.references.add(self.values, count)
        for noise in self.noises:
            noise.waiting.clear()


def scale_of(window: int, before: int) -> float:
    """A reference of ``before`` samples is noisier than a whole one by this."""
    inverse = 1 / window
    return math.sqrt((inverse + 1 / before) / (inverse + 1 / REFERENCE))


def level(values: Sequence[float], window: int = SHORT_WINDOW + 1) -> float:
    """Mean of the ordered values between two quantiles, those for windows of this length."""
    return trimmed_mean(sorted(values), SHORT_TRIM if window <= SHORT_WINDOW else LONG_TRIM)


def trimmed_mean(ordered: Sequence[float], trim: tuple[float, float]) -> float:
    """Of what lies between two quantiles."""
    first, last = bounds(len(ordered), trim)
    return sum(ordered[first:last]) / (last - first)


def bounds(count: int, trim: tuple[float, float]) -> tuple[int, int]:
    """Places of the quantiles in so many values, one place apart at least."""
    first = int(count * trim[0])
    return first, max(first + 1, int(count * trim[1]))


# Of each window.
BOUNDS = tuple(
    bounds(window, SHORT_TRIM if window <= SHORT_WINDOW else LONG_TRIM) for window in WINDOWS
)


@cache
def quantile_of(window: int, alarm_rate: float) -> float:
    """Standard deviations that chance passes ``alarm_rate`` times a step.

    Looks at a window are independent about twice in its length: each may fail with
    alarm_rate * window / 2.
    """
    tail = TAIL_DEVIATIONS * max(0.0, math.log2(TAIL_SAMPLES / window))
    return tail - NormalDist().inv_cdf(alarm_rate * window / 2)


@cache
def student(deviations: float, count: int) -> float:
    """The same quantile where the deviation was learned from ``count`` values.

    Expansion of Student's t in the normal quantile (Abramowitz and Stegun, 26.7.5, two terms).
    """
    z, freedom = deviations, max(count - 1, 1)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
