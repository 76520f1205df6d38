"""Has the level of a noisy signal shifted? Asked in windows of several lengths at once.

A large shift shows in a few samples, a small one needs many. For each window length the mean of
the newest samples is compared with that of up to REFERENCE samples before them, and the difference
with the differences that the same job showed in health at the same length: so autocorrelation and
slow wandering are paid for where they weigh (docs/detection-methods.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cache
from statistics import NormalDist

from warpwatch_detection.signals.signal_history import (
    LOOKS,
    REFERENCE,
    SHORT_WINDOW,
    WINDOWS,
    SignalHistory,
    level,
    scale_of,
)

# False alarms a step and window that normal noise may raise.
ALARM_RATE = 4e-6
# A rise must have cost two thirds of a step besides, so that the short and small humps after a
# checkpoint or an evaluation do not count: 8 % in 12 steps, 6 % in 24, 4 % in 60.
COST_STEPS = 0.65
# A shift is larger than every excursion of the past that went away by itself.
PEAK_FACTOR = 1.1
# Differences that a window's noise is learned from at least.
MIN_LEARNED = 3
# Differences wait until no shift has followed: a window's length in long windows, half in short.
LONG_WAITING = 2
SHORT_WAITING = 1
# A window's noise is learned from as many differences as lie in so many samples, within counts.
MEMORY_SAMPLES = 2000
MEMORY_COUNTS = (12, 60)
# The memory of past excursions fades over so many samples.
PEAK_SAMPLES = 4000
# Noise of short windows is heavier in the tails than normal: standard deviations more for each
# halving below 40 samples, where the central limit theorem has not done its work yet.
TAIL_DEVIATIONS = 1.0
TAIL_SAMPLES = 40
# No step time is steadier than this (near-constant series have no noise to learn).
MIN_DEVIATION = 0.002
# Neighbouring samples of independent normal noise differ by 2 sigma / sqrt(pi) in the mean.
SIGMA_PER_CHANGE = math.sqrt(math.pi) / 2
# A trimmed mean's standard deviation over that of the mean: 8 to 18 % more for normal noise.
TRIM_LOSS = 1.1


@dataclass(slots=True)
class WindowNoise:
    """How a window's difference varied in health. Variance about zero, of ``count`` differences.

    deviation: its root. waiting: the newest differences, learned later when no shift has
    followed; so a slow rise does not teach its own limit. peak: the largest that was learned.
    """

    window: int
    count: int = 0
    variance: float = 0.0
    deviation: float = 0.0
    peak: float = 0.0
    waiting: list[float] = field(default_factory=list)

    def learn(self, difference: float) -> None:
        """Every half window: takes in the difference that has waited long enough."""
        self.waiting.append(difference)
        if len(self.waiting) <= (SHORT_WAITING if self.window <= SHORT_WINDOW else LONG_WAITING):
            return
        healthy = self.waiting.pop(0)
        least, most = MEMORY_COUNTS
        if self.count < max(least, min(most, 2 * MEMORY_SAMPLES // self.window)):
            self.count += 1
        self.variance += (healthy * healthy - self.variance) / self.count
        self.deviation = math.sqrt(self.variance)
        self.peak = max(abs(healthy), self.peak * (1 - self.window / PEAK_SAMPLES))


@dataclass(slots=True)
class Shift:
    """A level that changed: from ``before`` by ``difference``, seen in ``window`` samples."""

    before: float
    difference: float
    limit: float
    window: int


def _noises() -> list[WindowNoise]:
    return [WindowNoise(window) for window in WINDOWS]


@dataclass(slots=True)
class LevelShift:
    """``samples``: since the last shift. least_window: shorter ones are not judged; 0: unknown yet.

    difference: at the newest look whose noise is known; looked: its window's place in WINDOWS, -1
    before the first; scale: what its reference makes of the noise.
    nearest: the largest difference/limit so far.
    """

    samples: SignalHistory = field(default_factory=SignalHistory)
    least_window: int = 0
    noises: list[WindowNoise] = field(default_factory=_noises)
    difference: float = 0.0
    looked: int = -1
    scale: float = 1.0
    nearest: float = 0.0

    def judge(self, min_effect: float) -> Shift | None:
        """After each sample. A shift, up or down, is found once."""
        for window, difference in self.samples.differences(self.least_window):
            shift = self._look(window, difference, min_effect)
            if shift is not None:
                # What was learned of the noise stays; the old level goes.
                self.samples = self.samples.since(window // 2)
                for noise in self.noises:
                    noise.waiting.clear()
                return shift
        return None

    def recent(self, samples: int) -> float:
        """The level of the newest ``samples``."""
        return level(self.samples.values[-samples:])

    @property
    def ready(self) -> bool:
        return self.looked >= 0

    def limit(self, min_effect: float) -> float:
        """Of ``difference``, by what is known now; infinite while that is nothing."""
        if not self.ready:
            return math.inf
        spread = self.scale * (self.deviation(self.looked) + MIN_DEVIATION)
        peak = self.scale * PEAK_FACTOR * self.noises[self.looked].peak
        return max(min_effect + COST_STEPS / WINDOWS[self.looked], spread, peak)

    def deviation(self, index: int = len(WINDOWS) - 1) -> float:
        """What chance may do to a window's difference; infinite while nothing is known.

        The least that was learned of it and of shorter windows, whose means vary more. But no
        less than independent samples leave, which is known from many more of them.
        """
        window = WINDOWS[index]
        deviations = quantile_of(window, ALARM_RATE)
        learned = min(
            [
                student(deviations, noise.count) * noise.deviation
                for noise in self.noises[: index + 1]
                if noise.count >= MIN_LEARNED
            ],
            default=math.inf,
        )
        sigma = SIGMA_PER_CHANGE * self.samples.change * TRIM_LOSS
        return max(learned, deviations * sigma * math.sqrt(1 / window + 1 / REFERENCE))

    def _look(self, window: int, difference: float, min_effect: float) -> Shift | None:
        index = WINDOWS.index(window)
        noise, before = self.noises[index], len(self.samples.values) - window
        scale = 1.0 if before >= REFERENCE else scale_of(window, before)
        if noise.count >= MIN_LEARNED:
            self.difference, self.looked, self.scale = difference, index, scale
            # Most differences are far below the part of the limit that is known at once.
            least = min_effect + COST_STEPS / window
            if difference > self.nearest * least or abs(difference) >= least:
                limit = self.limit(min_effect)
                self.nearest = max(self.nearest, difference / limit)
                if abs(difference) >= limit:
                    level_before = self.samples.references.before(window)
                    return Shift(level_before, difference, limit, window)
        if self.samples.count % (window // 2) < window // LOOKS:
            noise.learn(difference / scale)
        return None


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
