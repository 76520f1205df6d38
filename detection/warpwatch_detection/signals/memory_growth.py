"""Whether a level grows without end: medians of blocks, a robust slope, growth in every part.

Two scales share one code: short blocks for a leak that fills the device within hours, and blocks
of sixteen of them for one that comes with every evaluation or epoch. What would fill it sooner is
found by how much is left (exhaustion.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from warpwatch_detection.detector import WARMUP_STEPS
from warpwatch_detection.signals.exhaustion import Exhaustion
from warpwatch_detection.signals.trend import (
    GrowthPoint,
    Trend,
    begin_of,
    every_part_grows,
    trend,
)

# A window of 600 steps, twice what caches that settle take.
BLOCK_STEPS = 25
WINDOW_BLOCKS = 24
# What a window must span, so that neither few nor very fast steps decide.
MIN_STEPS = 500
MIN_S = 30.0
# Evaluations in a row with growth: two, so that ranks that leak alike are found together.
HOLD_BLOCKS = 2
# Evaluations in a row without growth after which it is over.
RELEASE_BLOCKS = 2
# Short blocks in one long block.
LONG_BLOCK = 16
# Growth of a process that began with the run may be its data, a cache or a replay buffer: it counts
# when it has taken so much of what was left, or by the long blocks.
MIN_START_SHARE = 0.05
# The part of its limit at which it is told with peers that were found.
SUSPECTED = 0.5
# Samples of a block that are kept: memory is bounded whatever a block is.
MAX_SAMPLES = 64


@dataclass(slots=True)
class GrowthWindow:
    """The newest blocks. highest: of those that have left it.

    held, missed: evaluations in a row that grew or did not. begin_step: of growth that is found;
    held_step: where that would begin; from_start: it began with the run. nearest: the largest
    excess so far and its step.
    """

    points: list[GrowthPoint] = field(default_factory=list)
    highest: float = 0.0
    held: int = 0
    held_step: int = 0
    from_start: bool = False
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
                self.held_step = begin_of(self.points)
                self.from_start = not self.highest and self.held_step <= self.points[2].step
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
    """One level of one rank: samples in, blocks of two lengths, three windows.

    patient: growth that began with the run may be healthy.
    """

    first_step: int
    patient: bool = False
    samples: list[float] = field(default_factory=list)
    block_step: int | None = None
    block_time: float = 0.0
    short: GrowthWindow = field(default_factory=GrowthWindow)
    long: GrowthWindow = field(default_factory=GrowthWindow)
    exhaustion: Exhaustion = field(default_factory=Exhaustion)
    pending: list[GrowthPoint] = field(default_factory=list)

    @property
    def found(self) -> GrowthWindow | Exhaustion | None:
        """The window in which it grows."""
        if self.short.grows and not self._may_be_healthy():
            return self.short
        return next((one for one in (self.exhaustion, self.long) if one.grows), None)

    @property
    def window(self) -> GrowthWindow | Exhaustion:
        """The one that says most of it."""
        suspected = not self.short.held and self.exhaustion.excess >= SUSPECTED
        return self.found or (self.exhaustion if suspected else self.short)

    @property
    def suspected(self) -> bool:
        held = self.short.held > 0 or self.long.held > 0
        return held or self.exhaustion.excess >= SUSPECTED or self.found is not None

    def _may_be_healthy(self) -> bool:
        known = self.patient and self.short.from_start and bool(self.exhaustion.points)
        return known and self.exhaustion.share < MIN_START_SHARE

    def add(self, step: int, time: float, value: float, left: float | None, ranks: int) -> bool:
        """Return True if the growth has been judged.

        ``left``: what is left for it now, if known. ``ranks``: those of the job.
        """
        if self.block_step is None:
            if step - self.first_step < WARMUP_STEPS:
                return False
            self.block_step, self.block_time = step, time
        now = GrowthPoint(step, time, value, -1.0 if left is None else left)
        is_judged = self.exhaustion.add(now, ranks)
        if len(self.samples) < MAX_SAMPLES:
            self.samples.append(value)
        if step - self.block_step < BLOCK_STEPS - 1:
            return is_judged
        point = GrowthPoint(self.block_step, self.block_time, median(self.samples))
        self.samples.clear()
        # The next one begins here: where samples are rare, each of them is a block.
        self.block_step, self.block_time = step + 1, time
        self._add_block(point)
        return True

    def _add_block(self, point: GrowthPoint) -> None:
        self.short.add(point)
        self.pending.append(point)
        if len(self.pending) >= LONG_BLOCK:
            first, values = self.pending[0], [block.value for block in self.pending]
            self.pending.clear()
            self.long.add(GrowthPoint(first.step, first.time, median(values)))
