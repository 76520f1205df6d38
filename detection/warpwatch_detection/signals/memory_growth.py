"""Whether a level grows without end: medians of blocks, a robust slope, growth in every part.

Two scales share one code: short blocks for a leak that fills the device within hours, and blocks
of sixteen of them for one that comes with every evaluation or epoch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import median

from warpwatch_detection.detector import WARMUP_STEPS
from warpwatch_detection.signals.medians import SIGMA_PER_MAD

# A window of 600 steps, twice what caches that settle take.
BLOCK_STEPS = 25
WINDOW_BLOCKS = 24
# What a window must span, so that neither few nor very fast steps decide.
MIN_STEPS = 500
MIN_S = 30.0
# Growth counts above this part of the level, and above so many times the scatter about the line.
# Two segments of 20 MB of PyTorch's allocator and some, within a window.
MIN_GROWTH_BYTES = 64e6
MIN_GROWTH_RATIO = 0.005
NOISE_FACTOR = 5.0
# Parts of the window that must all grow, each by this part of an even share.
PARTS = 6
MIN_PART = 0.25
# A cache that fills slows down, what leaks does not: least growth of the end against the begin.
MIN_LATE = 0.7
# Evaluations in a row with growth: two, so that ranks that leak alike are found together.
HOLD_BLOCKS = 2
# Evaluations in a row without growth after which it is over.
RELEASE_BLOCKS = 2
# Short blocks in one long block.
LONG_BLOCK = 16
# Samples of a block that are kept: memory is bounded whatever a block is.
MAX_SAMPLES = 64


@dataclass(slots=True)
class GrowthPoint:
    """``value`` of a block at ``step`` (the block's first) and ``time``."""

    step: int
    time: float
    value: float


@dataclass(slots=True)
class Trend:
    """Growth a step over a window, in the value's unit; ``limit`` is the least that counts.

    steps_per_s: how fast the job went through the window. excess: growth over its limit, which
    says something only where every part of the window grew.
    """

    slope: float = 0.0
    limit: float = 0.0
    excess: float = 0.0
    steps_per_s: float = 0.0


@dataclass(slots=True)
class GrowthWindow:
    """The newest blocks. highest: of those that have left it.

    held, missed: evaluations in a row that grew or did not. begin_step: of growth that is found;
    held_step: where that would begin. nearest: the largest excess so far and its step.
    """

    points: list[GrowthPoint] = field(default_factory=list)
    highest: float = 0.0
    held: int = 0
    held_step: int = 0
    missed: int = 0
    begin_step: int | None = None
    nearest: float | None = None
    nearest_step: int | None = None

    @property
    def grows(self) -> bool:
        return self.begin_step is not None

    def add(self, point: GrowthPoint) -> None:
        self.points.append(point)
        if len(self.points) > WINDOW_BLOCKS:
            self.highest = max(self.highest, self.points.pop(0).value)
        if len(self.points) < WINDOW_BLOCKS:
            return
        excess = self._excess()
        if self.nearest is None or excess > self.nearest:
            self.nearest, self.nearest_step = excess, point.step
        if excess >= 1.0:
            if self.held == 0:
                self.held_step = self.points[0].step
            self.held, self.missed = self.held + 1, 0
            if self.held >= HOLD_BLOCKS and self.begin_step is None:
                self.begin_step = self.held_step
        else:
            self.held, self.missed = 0, self.missed + 1
            if self.missed >= RELEASE_BLOCKS:
                self.begin_step = None

    def trend(self) -> Trend:
        """Of a full window; of any other nothing is known."""
        return trend(self.points) if len(self.points) >= WINDOW_BLOCKS else Trend()

    def _excess(self) -> float:
        """Growth over its limit; 0 unless every part of the window grew, to new heights."""
        first, last = self.points[0], self.points[-1]
        is_long = last.step - first.step >= MIN_STEPS and last.time - first.time >= MIN_S
        # A sawtooth that has been as high before is no news.
        if not is_long or last.value <= self.highest or not every_part_grows(self.points):
            return 0.0
        return self.trend().excess


@dataclass(slots=True)
class MemoryGrowth:
    """One level of one rank: samples in, blocks of two lengths, two windows."""

    first_step: int
    samples: list[float] = field(default_factory=list)
    block_step: int | None = None
    block_time: float = 0.0
    short: GrowthWindow = field(default_factory=GrowthWindow)
    long: GrowthWindow = field(default_factory=GrowthWindow)
    pending: list[GrowthPoint] = field(default_factory=list)

    @property
    def window(self) -> GrowthWindow:
        """The one that decides: the short one unless only the long one grows."""
        return self.long if self.long.grows and not self.short.grows else self.short

    @property
    def suspected(self) -> bool:
        return self.short.held > 0 or self.long.held > 0 or self.window.grows

    def add(self, step: int, time: float, value: float) -> bool:
        """True when a block is full and the growth has been judged."""
        if self.block_step is None:
            if step - self.first_step < WARMUP_STEPS:
                return False
            self.block_step, self.block_time = step, time
        if len(self.samples) < MAX_SAMPLES:
            self.samples.append(value)
        if step - self.block_step < BLOCK_STEPS - 1:
            return False
        point = GrowthPoint(self.block_step, self.block_time, median(self.samples))
        self.samples.clear()
        # The next one begins here: where samples are rare, each of them is a block.
        self.block_step, self.block_time = step + 1, time
        self.short.add(point)
        self.pending.append(point)
        if len(self.pending) >= LONG_BLOCK:
            first, values = self.pending[0], [point.value for point in self.pending]
            self.pending.clear()
            self.long.add(GrowthPoint(first.step, first.time, median(values)))
        return True


def trend(points: list[GrowthPoint]) -> Trend:
    """How the level moved over a full window."""
    first, last = points[0], points[-1]
    steps, seconds = max(1, last.step - first.step), last.time - first.time
    slope = theil_sen(points)
    offsets = [point.value - slope * (point.step - first.step) for point in points]
    base = median(offsets)
    noise = SIGMA_PER_MAD * median([abs(offset - base) for offset in offsets])
    least = max(MIN_GROWTH_BYTES, MIN_GROWTH_RATIO * abs(base), NOISE_FACTOR * noise)
    pace = steps / seconds if seconds > 0 else 0.0
    excess = slope * steps / least if least > 0 else 0.0
    return Trend(slope, least / steps, excess, pace)


def theil_sen(points: list[GrowthPoint]) -> float:
    """Median of the slopes between all pairs: right with up to 29 % of outliers (Sen, 1968)."""
    pairs = combinations(points, 2)
    return median([(b.value - a.value) / (b.step - a.step) for a, b in pairs if b.step > a.step])


def every_part_grows(points: list[GrowthPoint]) -> bool:
    size = len(points) // PARTS
    values = [point.value for point in points[len(points) - size * PARTS :]]
    parts = [median(values[start : start + size]) for start in range(0, len(values), size)]
    total = parts[-1] - parts[0]
    if total <= 0:
        return False
    rises = [after - before for before, after in pairwise(parts)]
    if min(rises) < MIN_PART * total / len(rises):
        return False
    return sum(rises[-2:]) >= MIN_LATE * sum(rises[:2])
