"""The newest samples of a signal: how far is each window of them from those before it?

The levels of windows are worked out when they are due, and once for all detectors that judge the
same signal.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field

# SignalHistory of each window: about 1.5 times the one before; 140 still ends within 150 steps.
WINDOWS = (12, 16, 24, 40, 60, 100, 140)
SHORTEST, LONGEST = WINDOWS[0], WINDOWS[-1]
# SignalHistory before the window that it is compared with, and the least of them.
REFERENCE = 200
MIN_REFERENCE = 40
KEPT = LONGEST + REFERENCE
# A level is wanted from where the shortest window ends until the longest one has passed by.
WANTED = LONGEST - SHORTEST + 1
# A window is looked at five times in its length: whenever the count of samples is a multiple of
# this. Which windows are due repeats after PERIOD samples.
LOOKS = 5
PACES = tuple(window // LOOKS for window in WINDOWS)
PERIOD = math.lcm(*PACES)
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
# Differences that wait: a window's length in long windows, half of it in short ones.
LONG_WAITING = 2
SHORT_WAITING = 1
# A window's noise is learned from as many differences as lie in so many samples, within counts.
MEMORY_SAMPLES = 2000
MEMORY_COUNTS = (12, 60)
# The usual change from one sample to the next is learned over so many of them; what is above so
# many times the mean counts as that.
CHANGE_SAMPLES = 500
CHANGE_CUT = 4.0
CHANGE_CUT_AFTER = 20
# The memory of past excursions fades over so many samples.
PEAK_SAMPLES = 4000


@dataclass(frozen=True, slots=True)
class WindowSpec:
    """What is known of a window beforehand; samples: its length, index: its place in WINDOWS.

    first, last: between them lie its trimmed values in order. It is due whenever the count of
    samples is a multiple of ``pace``; once in ``half`` a window it is learned from what is seen.
    waiting, memory: differences that wait, and that count. fade: what is left of an old peak.
    """

    index: int
    samples: int
    is_short: bool
    first: int
    last: int
    pace: int
    half: int
    waiting: int
    memory: int
    fade: float


def _ring() -> list[float]:
    return [0.0] * WANTED


@dataclass(slots=True)
class ReferenceLevels:
    """Levels of the samples that windows are compared with, worked out once for all windows.

    The same samples lie before a short window now and before a long one later. ordered: those
    before the shortest window; short, long: levels for windows of either kind, rings by the count
    of samples when their newest came.
    """

    ordered: list[float] = field(default_factory=list)
    short: list[float] = field(default_factory=_ring)
    long: list[float] = field(default_factory=_ring)

    def add(self, values: Sequence[float], count: int) -> None:
        """``values`` has got its newest one, the ``count``-th of all."""
        ordered, known = self.ordered, len(values) - SHORTEST
        if known <= 0:
            return
        insort(ordered, values[-1 - SHORTEST])
        if known > REFERENCE:
            del ordered[bisect_left(ordered, values[-1 - SHORTEST - REFERENCE])]
        elif known < MIN_REFERENCE:
            return
        end = count - SHORTEST
        due = end % PERIOD
        if due in SHORT_DUE:
            first, last = SHORT_BOUNDS[len(ordered)]
            self.short[end % WANTED] = sum(ordered[first:last]) / (last - first)
        if due in LONG_DUE:
            first, last = LONG_BOUNDS[len(ordered)]
            self.long[end % WANTED] = sum(ordered[first:last]) / (last - first)


@dataclass(slots=True)
class SignalHistory:
    """``values``: the newest, at most two windows and references.

    count: of all samples. change: mean of |difference| of neighbouring ones. differences: of each
    window that is due now, by its index: its level over that of the samples before it.
    """

    count: int = 0
    values: list[float] = field(default_factory=list)
    references: ReferenceLevels = field(default_factory=ReferenceLevels)
    change: float = 0.0
    differences: dict[int, float] = field(default_factory=dict)

    def add(self, value: float) -> None:
        values = self.values
        self.count = count = self.count + 1
        if values:
            self._learn_change(abs(value - values[-1]))
        values.append(value)
        if count % KEPT == 0:
            del values[:-KEPT]
        references = self.references
        references.add(values, count)
        known = len(values) - MIN_REFERENCE
        self.differences = differences = {}
        for window in DUE[count % PERIOD]:
            samples = window.samples
            if samples <= known:
                trimmed = sorted(values[-samples:])[window.first : window.last]
                levels = references.short if window.is_short else references.long
                before = levels[(count - samples) % WANTED]
                differences[window.index] = sum(trimmed) / len(trimmed) - before

    def before(self, window: WindowSpec) -> float:
        """The level before the window, of MIN_REFERENCE samples or more."""
        references = self.references
        levels = references.short if window.is_short else references.long
        return levels[(self.count - window.samples) % WANTED]

    def since(self, samples: int) -> SignalHistory:
        """What is left when all but the newest ``samples`` are forgotten."""
        left = SignalHistory(self.count, change=self.change)
        kept = self.values[-samples:]
        for count, value in enumerate(kept, self.count - len(kept) + 1):
            left.values.append(value)
            left.references.add(left.values, count)
        return left

    def _learn_change(self, change: float) -> None:
        """A slow step is two large changes: cut, once it is known what is large."""
        count, usual = self.count, self.change
        if change > CHANGE_CUT * usual and count > CHANGE_CUT_AFTER:
            change = CHANGE_CUT * usual
        self.change += (change - usual) / (count if count < CHANGE_SAMPLES else CHANGE_SAMPLES)


def scale_of(window: int, before: int) -> float:
    """A reference of ``before`` samples is noisier than a whole one by this."""
    inverse = 1 / window
    return math.sqrt((inverse + 1 / before) / (inverse + 1 / REFERENCE))


def level(values: Sequence[float], window: int = SHORT_WINDOW + 1) -> float:
    """Mean of the ordered values between two quantiles, those for windows of this length."""
    trim = SHORT_TRIM if window <= SHORT_WINDOW else LONG_TRIM
    first, last = bounds(len(values), trim)
    return sum(sorted(values)[first:last]) / (last - first)


def bounds(count: int, trim: tuple[float, float]) -> tuple[int, int]:
    """RankDevices of the quantiles in so many values, one place apart at least."""
    first = int(count * trim[0])
    return first, max(first + 1, int(count * trim[1]))


# Of references, by how many samples they are.
SHORT_BOUNDS, LONG_BOUNDS = (
    tuple(bounds(count, trim) for count in range(REFERENCE + 1)) for trim in (SHORT_TRIM, LONG_TRIM)
)


def _window(index: int, samples: int) -> WindowSpec:
    is_short, (low, high) = samples <= SHORT_WINDOW, MEMORY_COUNTS
    first, last = bounds(samples, SHORT_TRIM if is_short else LONG_TRIM)
    return WindowSpec(
        index=index,
        samples=samples,
        is_short=is_short,
        first=first,
        last=last,
        pace=PACES[index],
        half=samples // 2,
        waiting=SHORT_WAITING if is_short else LONG_WAITING,
        memory=max(low, min(high, 2 * MEMORY_SAMPLES // samples)),
        fade=1 - samples / PEAK_SAMPLES,
    )


BY_INDEX = tuple(_window(*one) for one in enumerate(WINDOWS))
# Those that are due at each count of samples in a period.
DUE = tuple(
    tuple(window for window in BY_INDEX if count % window.pace == 0) for count in range(PERIOD)
)
