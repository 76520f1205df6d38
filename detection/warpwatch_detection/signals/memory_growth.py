"""Detects a level that grows without end: medians of blocks, a robust slope, growth in every part.

There are two scales: short blocks for a leak that fills the device within hours, and blocks of
sixteen short ones for a leak in each evaluation or epoch. A leak that would fill the memory sooner
is found by the share of free memory that it took (``Exhaustion``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations, pairwise
from statistics import median
from typing import ClassVar

from warpwatch_detection.detector import WARMUP_STEPS, Nearest
from warpwatch_detection.signals.baselines import SIGMA_PER_MAD

# Growth counts above MIN_GROWTH_RATIO of the level and NOISE_FACTOR times the scatter.
# Two segments of 20 MB of PyTorch's allocator and some, within a window.
MIN_GROWTH_BYTES = 64e6
MIN_GROWTH_RATIO = 0.005
NOISE_FACTOR = 5.0
# Parts of the window that must all grow, each by this part of an even share.
PARTS = 6
MIN_PART = 0.25
# A filling cache slows down, a leak does not: the least growth of the last parts over the first.
MIN_LATE = 0.7


@dataclass(slots=True)
class GrowthPoint:
    """The level of a block. step, time: its start. left: the free memory then, -1 if unknown."""

    step: int
    time: float
    value: float
    left: float = -1.0


@dataclass(slots=True)
class Trend:
    """The growth per step over a window, in the value's unit; ``limit`` is the least that counts.

    excess: the growth over its limit, which counts only if every part of the window grew.
    steps_per_s: the job's speed in the window.
    """

    slope: float = 0.0
    limit: float = 0.0
    excess: float = 0.0
    steps_per_s: float = 0.0


def trend(points: list[GrowthPoint]) -> Trend:
    """Return the growth of the level over a full window."""
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


def begin_of(points: list[GrowthPoint]) -> int:
    """Return the step at which the newer half's line meets the level of the first points."""
    newer = points[len(points) // 2 :]
    slope = theil_sen(newer)
    if slope <= 0:
        return points[0].step
    level = median([point.value for point in points[:3]])
    offset = median([point.value - slope * (point.step - newer[0].step) for point in newer])
    begin = newer[0].step - (offset - level) / slope
    return round(min(max(begin, points[0].step), newer[0].step))


def theil_sen(points: list[GrowthPoint]) -> float:
    """Return the median slope of all pairs: right with up to 29 % of outliers (Sen, 1968)."""
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


@dataclass(slots=True)
class Growth(Nearest):
    """The points of a level, oldest first; ``least`` of them show a trend.

    begin_step: the start of the growth, None unless growth is found.
    """

    least: ClassVar[int]
    points: list[GrowthPoint] = field(default_factory=list)
    begin_step: int | None = None

    @property
    def grows(self) -> bool:
        return self.begin_step is not None

    def trend(self) -> Trend:
        """Return the trend, which is empty for too few points."""
        return trend(self.points) if len(self.points) >= self.least else Trend()


# Growth counts if it has used this share of the memory that was left at its start. It is well below
# a half, and more than a process loads and caches at first on a host of its size.
MIN_SHARE = 0.25
# Growth has at least two points in each sixth. At MAX_POINTS every second point is dropped.
MIN_POINTS = 12
MAX_POINTS = 24
# The next gap, in gaps before every second point is dropped: twice, with room for jitter. Points
# that came closer together than the older ones would look like growth that slows down.
NEXT_GAP = 1.9
# A level that does not grow keeps this many points.
FLAT_POINTS = 4
# If the last third grew by less than this part of an even share, there is no growth.
MIN_LAST = 0.25
# Points are at least this far apart, and one step.
MIN_APART_S = 1.0
# Growth that becomes this many times as fast counts as new growth.
FASTER = 3.0
# The most ranks of one host that leak alike.
MAX_RANKS = 16


@dataclass(slots=True)
class Exhaustion(Growth):
    """The growth of a rank that takes the host's free memory, or the newest points of a level.

    apart_s: the seconds from one point to the next. share: the part of the free memory at the first
    point that was taken since. excess: the share over its limit, 0 unless every part grew.
    """

    least: ClassVar[int] = MIN_POINTS
    apart_s: float = MIN_APART_S
    share: float = 0.0
    excess: float = 0.0

    def add(self, point: GrowthPoint, ranks: int) -> bool:
        """Add a sample of one of ``ranks``. Return whether growth is found or was found before."""
        if point.left < 0 or (self.points and not self._is_due(point)):
            return False
        self.points.append(point)
        self._evaluate(min(ranks, MAX_RANKS))
        if len(self.points) < MIN_POINTS:
            return False
        if self._is_level():
            was, self.begin_step = self.grows, None
            self._restart(self.points[-FLAT_POINTS:])
            return was
        if len(self.points) >= MAX_POINTS:
            gaps_s = [after.time - before.time for before, after in pairwise(self.points)]
            self.points, self.apart_s = self.points[1::2], NEXT_GAP * median(gaps_s)
        return self.grows

    def _is_due(self, point: GrowthPoint) -> bool:
        """Return whether to keep the point. Restart if growth is much faster than before."""
        points = self.points
        last = points[-1]
        passed_s = point.time - last.time
        if point.step <= last.step or passed_s < MIN_APART_S:
            return False
        pace = (last.value - points[0].value) / max(last.time - points[0].time, MIN_APART_S)
        usual = FASTER * max(0.0, pace) * passed_s
        if len(points) > 1 and point.value - last.value > usual + MIN_GROWTH_BYTES:
            self._restart(points[-1:])
            return True
        return passed_s >= self.apart_s

    def _restart(self, points: list[GrowthPoint]) -> None:
        self.points, self.apart_s, self.excess = points, MIN_APART_S, 0.0

    def _is_level(self) -> bool:
        """Return whether the last third rose by much less than a third of the whole."""
        values = [point.value for point in self.points]
        grown, third = values[-1] - values[0], len(values) // 3
        return grown <= 0 or values[-1] - values[-1 - third] < MIN_LAST * grown / 3

    def _evaluate(self, ranks: int) -> None:
        first, last = self.points[0], self.points[-1]
        grown = last.value - first.value
        # Memory that other processes took does not count.
        gone = max(grown, min(first.left - last.left, ranks * grown))
        self.share = gone / (last.left + gone) if gone > 0 else 0.0
        clear = len(self.points) >= MIN_POINTS and every_part_grows(self.points)
        self.excess = self.share / MIN_SHARE if clear and self.trend().excess >= 1.0 else 0.0
        self.reach(self.excess, last.step)
        if self.excess >= 1.0 and self.begin_step is None:
            self.begin_step = begin_of(self.points)


# A window is 600 steps, twice the time in which caches settle.
BLOCK_STEPS = 25
WINDOW_BLOCKS = 24
# A window spans at least this, so that neither few nor very fast steps decide.
MIN_STEPS = 500
MIN_S = 30.0
# Growth is found after two blocks in a row with it, so that ranks that leak alike are found
# together, and is over after two without.
HOLD_BLOCKS = 2
RELEASE_BLOCKS = 2
# The number of short blocks in a long block.
LONG_BLOCK = 16
# Growth of a process that began with the run may be its data, a cache or a replay buffer. It counts
# when it has used this share of what was left, or by the long blocks.
MIN_START_SHARE = 0.05
# From this part of its limit on, a rank is named together with peers that are found.
SUSPECTED = 0.5
# A block keeps this many samples, to bound memory.
MAX_SAMPLES = 64


@dataclass(slots=True)
class GrowthWindow(Growth):
    """The newest blocks of a level.

    highest: the highest block that has left the window. held, missed: the blocks in a row with and
    without growth. held_step: the start of the growth of the held blocks. from_start: whether that
    is the start of the run.
    """

    least: ClassVar[int] = WINDOW_BLOCKS
    highest: float = 0.0
    held: int = 0
    held_step: int = 0
    from_start: bool = False
    missed: int = 0

    def add(self, point: GrowthPoint) -> None:
        self.points.append(point)
        if len(self.points) > WINDOW_BLOCKS:
            self.highest = max(self.highest, self.points.pop(0).value)
        if len(self.points) < WINDOW_BLOCKS:
            return
        excess = self._excess()
        self.reach(excess, point.step)
        if excess >= 1.0:
            if self.held == 0:
                self.held_step = begin_of(self.points)
                self.from_start = not self.highest and self.held_step <= self.points[2].step
            self.held, self.missed = self.held + 1, 0
            if self.held >= HOLD_BLOCKS and self.begin_step is None:
                self.begin_step = self.held_step
        else:
            self.held, self.missed = 0, self.missed + 1
            if self.missed >= RELEASE_BLOCKS:
                self.begin_step = None

    def _excess(self) -> float:
        """Return growth over its limit; 0 unless every part of the window grew to a new high."""
        first, last = self.points[0], self.points[-1]
        is_long = last.step - first.step >= MIN_STEPS and last.time - first.time >= MIN_S
        # A sawtooth that has been as high before does not grow.
        if not is_long or last.value <= self.highest or not every_part_grows(self.points):
            return 0.0
        return self.trend().excess


@dataclass(slots=True)
class MemoryGrowth:
    """One level of one rank, in three windows.

    patient: whether growth from the start of the run may be healthy. follows_load: whether any may,
    as caches of a server fill when other requests come. samples, block_step, block_time: the open
    block. pending: the short blocks of the open long block.
    """

    first_step: int
    patient: bool = False
    follows_load: bool = False
    samples: list[float] = field(default_factory=list)
    block_step: int | None = None
    block_time: float = 0.0
    short: GrowthWindow = field(default_factory=GrowthWindow)
    long: GrowthWindow = field(default_factory=GrowthWindow)
    exhaustion: Exhaustion = field(default_factory=Exhaustion)
    pending: list[GrowthPoint] = field(default_factory=list)

    @property
    def found(self) -> Growth | None:
        """The window in which the level grows, or None."""
        if self.short.grows and not self._may_be_healthy():
            return self.short
        return next((one for one in (self.exhaustion, self.long) if one.grows), None)

    @property
    def window(self) -> Growth:
        """The window to report."""
        suspected = not self.short.held and self.exhaustion.excess >= SUSPECTED
        return self.found or (self.exhaustion if suspected else self.short)

    @property
    def suspected(self) -> bool:
        held = self.short.held > 0 or self.long.held > 0
        return held or self.exhaustion.excess >= SUSPECTED or self.found is not None

    def _may_be_healthy(self) -> bool:
        may_be = self.follows_load or (self.patient and self.short.from_start)
        known = may_be and bool(self.exhaustion.points)
        return known and self.exhaustion.share < MIN_START_SHARE

    def add(self, step: int, time: float, value: float, left: float | None, ranks: int) -> bool:
        """Add a sample. Return whether the growth was evaluated.

        ``left``: the free memory, if it is known. ``ranks``: the number of ranks of the job.
        """
        if self.block_step is None:
            if step - self.first_step < WARMUP_STEPS:
                return False
            self.block_step, self.block_time = step, time
        now = GrowthPoint(step, time, value, -1.0 if left is None else left)
        is_evaluated = self.exhaustion.add(now, ranks)
        if len(self.samples) < MAX_SAMPLES:
            self.samples.append(value)
        if step - self.block_step < BLOCK_STEPS - 1:
            return is_evaluated
        point = GrowthPoint(self.block_step, self.block_time, median(self.samples))
        self.samples.clear()
        # The next block starts here, so if samples are rare, each of them is a block.
        self.block_step, self.block_time = step + 1, time
        self.short.add(point)
        self.pending.append(point)
        if len(self.pending) >= LONG_BLOCK:
            first, values = self.pending[0], [block.value for block in self.pending]
            self.pending.clear()
            self.long.add(GrowthPoint(first.step, first.time, median(values)))
        return True
