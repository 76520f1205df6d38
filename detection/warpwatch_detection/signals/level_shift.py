"""Detects shifts of the level of a noisy signal, in windows of several lengths at once.

A large shift shows in a few samples, a small one needs many. For each window length the mean of
the newest samples is compared with that of up to REFERENCE samples before them. The limit of this
difference comes from the differences that the same job showed in health at the same length, so it
includes autocorrelation and slow wandering (docs/detection-methods.md).
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache

from warpwatch_detection.detector import deviations

# Samples of each window: about 1.5 times the one before; 140 still ends within 150 steps.
WINDOWS = (12, 16, 24, 40, 60, 100, 140)
SHORTEST, LONGEST = WINDOWS[0], WINDOWS[-1]
# A window is compared with this many samples before it, or at least MIN_REFERENCE of them.
REFERENCE = 200
MIN_REFERENCE = 40
KEPT = LONGEST + REFERENCE
# A window is checked five times in its length. DUE has the windows to check at each sample; it
# repeats after PERIOD samples.
CHECKS = 5
PERIOD = math.lcm(*(window // CHECKS for window in WINDOWS))
DUE = tuple(
    tuple(window for window in WINDOWS if count % (window // CHECKS) == 0)
    for count in range(PERIOD)
)
# A level is the mean between these quantiles. A network or a neighbour makes steps longer, hardly
# ever shorter, so the fast steps vary half as much as the middle ones.
TRIM = (0.05, 0.35)
# The shortest window whose rise may be clear: 6 s at least.
CLEAR_WINDOW = 60
# The usual change between samples is learned over CHANGE_SAMPLES. A change of more than CHANGE_CUT
# times the mean is cut to that.
CHANGE_SAMPLES = 500
CHANGE_CUT = 4.0
CHANGE_CUT_AFTER = 20


@cache
def counted(values: int) -> slice:
    """Return the slice of ordered values between the two quantiles, one value at least."""
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
    """The levels of the samples that windows are compared with.

    The same samples lie before a short window now and before a long one later. ordered: the samples
    before the shortest window. levels: their level at each sample, the newest last.
    """

    ordered: list[float] = field(default_factory=list)
    levels: list[float] = field(default_factory=list)

    def add(self, values: Sequence[float]) -> None:
        """Update the levels after ``values`` got a new last one."""
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
        """Return the level before the newest ``window`` samples, if MIN_REFERENCE precede them."""
        return self.levels[SHORTEST - window - 1]


@dataclass(slots=True)
class SignalHistory:
    """The newest samples of a signal, at most two windows with their references.

    count: all samples so far. change: the mean of |difference| of neighbouring samples.
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
        """Yield each window that is due, and its level minus that of the samples before it."""
        known = len(self.values) - MIN_REFERENCE
        for window in DUE[self.count % PERIOD]:
            if least_window <= window <= known:
                newest = level(self.values[-window:])
                yield window, newest - self.references.before(window)

    def is_clear_rise(self, window: int) -> bool:
        """Return whether a long window's lower quartile is above the upper one of the reference."""
        if window < CLEAR_WINDOW:
            return False
        newest = sorted(self.values[-window:])
        before = sorted(self.values[-window - REFERENCE : -window])
        return newest[window // 4] > before[len(before) * 3 // 4]

    def since(self, samples: int) -> SignalHistory:
        """Return the history of only the newest ``samples``."""
        left = SignalHistory(self.count, change=self.change)
        for value in self.values[-samples:]:
            left.values.append(value)
            left.references.add(left.values)
        return left

    def _learn_change(self, change: float) -> None:
        """Learn a change, cut if it is large: one slow step causes two large changes."""
        if self.count > CHANGE_CUT_AFTER:
            change = min(change, CHANGE_CUT * self.change)
        self.change += (change - self.change) / min(self.count, CHANGE_SAMPLES)


# The least rise that counts: healthy jobs settle and wander by some per cent. A rise by a tenth in
# 600 samples, which is 3 % from the reference to the longest window, is a drift.
LEAST_EFFECT = 0.035
# A rise must also have cost the job this many steps. The short, small humps after a checkpoint or
# an evaluation have not; 8 % in 12 steps have, and 4 % in 24.
LEAST_COST = 1.0
# The noise of a window is known from this many differences on.
MIN_LEARNED = 3
# A difference is learned only after this many newer ones, one every half window, without a shift.
WAITING = 2
# ... and until the difference has changed its sign since: one that has not is a slow rise, which
# would teach its own limit. This applies once MIN_SURE differences are learned, which a settling
# job would never reach otherwise, and for at most MAX_WAIT, while the reference has the rise.
MIN_SURE = 12
MAX_WAIT = REFERENCE
# A difference is cut to this many deviations before it is learned.
LEARNED_DEVIATIONS = 4.0
# A window's noise is learned from the differences in this many samples, within MEMORY_COUNTS.
MEMORY_SAMPLES = 2000
MEMORY_COUNTS = (12, 60)
# A rise by a half (as a logarithm, or a share of the step) that is clear needs no long experience.
# It only has to exceed past excursions and CLEAR_DEVIATIONS, of however few differences.
CLEAR_EFFECT = math.log(1.5)
CLEAR_DEVIATIONS = 4.0
# The memory of past excursions fades over this many samples.
PEAK_SAMPLES = 4000
# The means of short windows have heavier tails than a normal distribution, as the central limit
# theorem needs more samples: the limit grows by this for each halving below TAIL_SAMPLES.
TAIL_DEVIATIONS = 1.0
TAIL_SAMPLES = 40
# Jobs settle by 5 % in their first 400 steps, which is not the noise of later steps.
SETTLING_SAMPLES = 400
# Neighbouring samples of independent normal noise differ by 2 sigma / sqrt(pi) in the mean.
SIGMA_PER_CHANGE = math.sqrt(math.pi) / 2
# A trimmed mean's standard deviation over that of the mean, for normal noise.
TRIM_LOSS = 1.27


@dataclass(slots=True)
class Noise:
    """The noise of ``count`` differences in health: their variance about zero, and its root."""

    count: int = 0
    variance: float = 0.0
    deviation: float = 0.0

    def learn(self, difference: float, most: int) -> None:
        self.count = min(self.count + 1, most)
        if self.count > MIN_LEARNED:
            # A fault just below the limit must not raise the limit.
            cut = LEARNED_DEVIATIONS * self.deviation
            difference = min(max(difference, -cut), cut)
        self.variance += (difference * difference - self.variance) / self.count
        self.deviation = math.sqrt(self.variance)

    def reach(self, quantile: float, tail: float, least: int = MIN_LEARNED) -> float:
        """Return the change by chance; infinite while fewer than ``least`` are known."""
        if self.count < least:
            return math.inf
        return (student(quantile, self.count) + tail) * self.deviation


@dataclass(slots=True)
class WindowNoise:
    """The noise of a window's difference in health: ever, and since the job has settled.

    waiting: the newest differences, which are learned later if no shift follows, so that a rise
    does not raise its own limit. peak: the largest learned difference, which fades.
    """

    window: int
    ever: Noise = field(default_factory=Noise)
    settled: Noise = field(default_factory=Noise)
    peak: float = 0.0
    waiting: list[float] = field(default_factory=list)

    @property
    def known(self) -> bool:
        return self.ever.count >= MIN_LEARNED

    def learn(self, difference: float, samples: int) -> None:
        """Queue the difference of each half window, and learn those that have waited enough.

        samples: the job's number of samples so far.
        """
        self.waiting.append(difference)
        while self._is_decided():
            self._learn(self.waiting.pop(0), samples)

    def _is_decided(self) -> bool:
        """Return whether the oldest difference was noise, as it went away again.

        A shift would have been found by now, and a large one in the first clear window.
        """
        if len(self.waiting) <= WAITING:
            return False
        waited = (len(self.waiting) - 1) * (self.window // 2)
        first, *later = self.waiting
        if abs(first) >= CLEAR_EFFECT and waited < CLEAR_WINDOW + self.window:
            return False
        is_gone = any((each > 0) != (first > 0) for each in later)
        return is_gone or self.ever.count < MIN_SURE or waited >= MAX_WAIT

    def _learn(self, healthy: float, samples: int) -> None:
        least, most = MEMORY_COUNTS
        count = max(least, min(most, 2 * MEMORY_SAMPLES // self.window))
        self.ever.learn(healthy, count)
        if samples > SETTLING_SAMPLES + 2 * self.window:
            self.settled.learn(healthy, count)
        self.peak = max(abs(healthy), self.peak * (1 - self.window / PEAK_SAMPLES))

    def reach(self, quantile: float, tail: float) -> float:
        # The settled noise counts only after a whole window and reference, so that it includes
        # wandering that is this slow.
        settled = self.settled.reach(quantile, tail, 2 * KEPT // self.window)
        return min(self.ever.reach(quantile, tail), settled)


@dataclass(slots=True)
class Shift:
    """A level that changed: from ``before`` by ``difference``, seen in ``window`` samples."""

    before: float
    difference: float
    limit: float
    window: int


@dataclass(slots=True)
class LevelShift:
    """The search for a signal's shifts.

    least_window: the shortest window that is checked; 0: not known yet. difference: the result of
    the newest check of a window with known noise. looked: the index of this window in WINDOWS, -1
    before the first. scale: the factor of the noise for its reference. nearest: the largest part of
    a limit so far.
    """

    samples: SignalHistory = field(default_factory=SignalHistory)
    least_window: int = 0
    noises: list[WindowNoise] = field(
        default_factory=lambda: [WindowNoise(window) for window in WINDOWS]
    )
    difference: float = 0.0
    looked: int = -1
    scale: float = 1.0
    nearest: float = 0.0

    def add(self, sample: float, rate: float, least_window: int = 0) -> Shift | None:
        """Add a sample and check the windows that are due. Return a shift, up or down, once.

        rate: false alarms per sample. The first ``least_window`` above 0 is kept.
        """
        self.samples.add(sample)
        self.least_window = self.least_window or least_window
        for window, difference in self.samples.differences(self.least_window):
            shift = self._check(window, difference, rate)
            if shift is not None:
                # The noise stays learned; the old level is dropped.
                self.samples = self.samples.since(window // 2)
                for noise in self.noises:
                    noise.waiting.clear()
                return shift
        return None

    def recent(self, samples: int) -> float:
        return level(self.samples.values[-samples:])

    @property
    def ready(self) -> bool:
        return self.looked >= 0

    def limit(self, rate: float) -> float:
        """Return the present limit of ``difference``; infinite while nothing is known."""
        if not self.ready:
            return math.inf
        noise = self.deviation(rate, self.looked)
        # A shift is larger than past excursions.
        past = self.noises[self.looked].peak
        return max(least_effect(WINDOWS[self.looked]), self.scale * max(noise, past))

    def least_limit(self, rate: float) -> float:
        """Return the least lasting rise that is found in a window of known noise."""
        learned = [
            max(least_effect(noise.window), self.deviation(rate, index), noise.peak)
            for index, noise in enumerate(self.noises)
            if noise.known
        ]
        return min(*learned, self._clear_limit(WINDOWS.index(CLEAR_WINDOW)))

    def deviation(self, rate: float, index: int = len(WINDOWS) - 1) -> float:
        """Return the change of a window's difference by chance; infinite while nothing is known.

        It is the least that was learned for this and for shorter windows, whose means vary more. It
        is never less than that of independent samples, which many more samples determine.
        """
        window = WINDOWS[index]
        # The tails of short windows are heavier than normal.
        quantile = quantile_of(window, rate)
        tail = TAIL_DEVIATIONS * max(0.0, math.log2(TAIL_SAMPLES / window))
        learned = min([noise.reach(quantile, tail) for noise in self.noises[: index + 1]])
        sigma = SIGMA_PER_CHANGE * self.samples.change * TRIM_LOSS
        return max(learned, (quantile + tail) * sigma * math.sqrt(1 / window + 1 / REFERENCE))

    def _check(self, window: int, difference: float, rate: float) -> Shift | None:
        index = WINDOWS.index(window)
        noise, before = self.noises[index], len(self.samples.values) - window
        # A short reference is noisier than a full one.
        scale = math.sqrt((1 / window + 1 / min(before, REFERENCE)) / (1 / window + 1 / REFERENCE))
        if noise.known:
            self.difference, self.looked, self.scale = difference, index, scale
            # Most differences are far below ``least``, and then the limit need not be computed.
            least = least_effect(window)
            if difference > self.nearest * least or abs(difference) >= least:
                limit = self.limit(rate)
                self.nearest = max(self.nearest, difference / limit)
                if abs(difference) >= limit:
                    return self._shift(window, difference, limit)
        if difference >= CLEAR_EFFECT and self.samples.is_clear_rise(window):
            clear = self._clear_limit(index)
            self.nearest = max(self.nearest, difference / clear)
            if difference >= clear:
                return self._shift(window, difference, clear)
        if self.samples.count % (window // 2) < window // CHECKS:
            noise.learn(difference / scale, self.samples.count)
        return None

    def _clear_limit(self, index: int) -> float:
        """Return the least clear rise of a window that counts, however little is known."""
        known = [noise.ever.deviation for noise in self.noises[: index + 1] if noise.known]
        deviation = min(known, default=0.0)
        return max(CLEAR_EFFECT, self.noises[index].peak, CLEAR_DEVIATIONS * deviation)

    def _shift(self, window: int, difference: float, limit: float) -> Shift:
        return Shift(self.samples.references.before(window), difference, limit, window)


def least_effect(window: int) -> float:
    return max(LEAST_EFFECT, LEAST_COST / window)


def quantile_of(window: int, rate: float) -> float:
    """Return the deviations that noise exceeds ``rate`` times per sample, in all windows together.

    Two checks of a window are independent if they are half its length apart.
    """
    return deviations(rate, window / 2, len(WINDOWS))


@lru_cache(maxsize=4096)
def student(deviations: float, count: int) -> float:
    """Return the quantile if the deviation was learned from ``count`` values only.

    It is an expansion in the normal quantile (Abramowitz and Stegun, 26.7.5, two terms).
    """
    z, freedom = deviations, max(count - 1, 1)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2


# The level of this many samples decides whether a rise is over.
CLOSING_SAMPLES = 20
# A rise is over below half of its size: far from the limit at which it opened, against flapping.
CLOSING_SHARE = 0.5
# A level that has lasted this long is the new normal: an operator has had time to look.
ACCEPT_SAMPLES, ACCEPT_AFTER_S = 300, 600.0
# An open anomaly gets its newest numbers once per this many samples.
UPDATE_SAMPLES = 20


@dataclass(slots=True)
class Rise:
    """A rise from ``baseline`` by ``size``, in the signal's unit; ``time``: when it was found."""

    time: float
    begin_step: int
    baseline: float
    size: float
    samples: int = 0

    def present(self, shifts: LevelShift) -> float | None:
        """Count a sample. Return the present level if it is time to check it."""
        self.samples += 1
        return None if self.samples % UPDATE_SAMPLES else shifts.recent(CLOSING_SAMPLES)

    def is_over(self, level: float) -> bool:
        """Return whether the rise is over. ``level``: the mean of the newest CLOSING_SAMPLES."""
        return level < self.baseline + CLOSING_SHARE * self.size

    def is_accepted(self, now: float) -> bool:
        return self.samples >= ACCEPT_SAMPLES and now - self.time >= ACCEPT_AFTER_S
