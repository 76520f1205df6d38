"""Whether a level grows without end: medians of blocks, a robust slope, growth in every part.

Two scales share one code: short blocks for a leak that fills the device within hours, and blocks
of sixteen of them for one that comes with every evaluation or epoch. Formulas: docs/detection.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

from warpwatch_detection.config_life import MemoryLeakConfig
from warpwatch_detection.signals.medians import SIGMA_PER_MAD, median

# Short blocks in one long block.
LONG_BLOCK = 16
# Parts of the window that must all grow, the last ones like the first ones.
PARTS = 6
# Evaluations without growth after which it is over.
RELEASE = 2
# Samples of a block that are kept: memory is bounded whatever a block is.
MAX_SAMPLES = 64


@dataclass(slots=True)
class GrowthPoint:
    """``value`` at ``step`` (the block's first) and ``time``."""

    step: int
    time: float
    value: float


@dataclass(slots=True)
class Trend:
    """MemoryGrowth a step over a window, in the value's unit; ``limit`` is the least that is told.

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

    held, missed: evaluations in a row that grew or did not. begin_step: of growth that is told;
    held_step: where that would begin. nearest: the largest excess so far and its step.
    """

    blocks: list[GrowthPoint] = field(default_factory=list)
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

    def add(self, block: GrowthPoint, config: MemoryLeakConfig) -> None:
        self.blocks.append(block)
        if len(self.blocks) > config.window_blocks:
            self.highest = max(self.highest, self.blocks.pop(0).value)
        if len(self.blocks) < config.window_blocks:
            return
        excess = self._excess(config)
        if self.nearest is None or excess > self.nearest:
            self.nearest, self.nearest_step = excess, block.step
        if excess >= 1.0:
            if self.held == 0:
                self.held_step = self.blocks[0].step
            self.held, self.missed = self.held + 1, 0
            if self.held >= config.hold_blocks and self.begin_step is None:
                self.begin_step = self.held_step
        else:
            self.held, self.missed = 0, self.missed + 1
            if self.missed >= RELEASE:
                self.begin_step = None

    def trend(self, config: MemoryLeakConfig) -> Trend:
        """Of a full window; of any other nothing is known."""
        full = len(self.blocks) >= config.window_blocks
        return trend(self.blocks, config) if full else Trend()

    def _excess(self, config: MemoryLeakConfig) -> float:
        """MemoryGrowth over its limit; 0 unless every part of the window grew, to new heights."""
        first, last = self.blocks[0], self.blocks[-1]
        long_enough = last.step - first.step >= config.min_steps
        # A sawtooth that has been as high before is no news.
        if not long_enough or last.time - first.time < config.min_s or last.value <= self.highest:
            return 0.0
        grows = _every_part_grows(self.blocks, config)
        return trend(self.blocks, config).excess if grows else 0.0


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
        """The one that tells: the short one unless only the long one grows."""
        return self.long if self.long.grows and not self.short.grows else self.short

    @property
    def suspected(self) -> bool:
        return self.short.held > 0 or self.long.held > 0 or self.window.grows

    def add(self, step: int, time: float, value: float, config: MemoryLeakConfig) -> bool:
        """True when a block is full and the growth has been judged anew."""
        begin, samples = self.block_step, self.samples
        if begin is None:
            if step - self.first_step < config.warmup_steps:
                return False
            begin = self.block_step = step
            self.block_time = time
        if len(samples) < MAX_SAMPLES:
            samples.append(value)
        if step - begin < config.block_steps - 1:
            return False
        block = GrowthPoint(begin, self.block_time, median(samples))
        samples.clear()
        # The next one begins here: where samples are rare, each of them is a block.
        self.block_step, self.block_time = step + 1, time
        self.short.add(block, config)
        self.pending.append(block)
        if len(self.pending) >= LONG_BLOCK:
            middle = median([part.value for part in self.pending])
            first = self.pending[0]
            self.pending.clear()
            self.long.add(GrowthPoint(first.step, first.time, middle), config)
        return True


def trend(blocks: list[GrowthPoint], config: MemoryLeakConfig) -> Trend:
    """How the level moved over a full window."""
    steps = max(1, blocks[-1].step - blocks[0].step)
    seconds = blocks[-1].time - blocks[0].time
    slope = theil_sen(blocks)
    first = blocks[0]
    offsets = [block.value - slope * (block.step - first.step) for block in blocks]
    base = median(offsets)
    noise = SIGMA_PER_MAD * median([abs(offset - base) for offset in offsets])
    least = max(
        config.min_growth_bytes, config.min_growth_ratio * abs(base), config.noise_factor * noise
    )
    pace = steps / seconds if seconds > 0 else 0.0
    excess = slope * steps / least if least > 0 else 0.0
    return Trend(slope, least / steps, excess, pace)


def theil_sen(blocks: list[GrowthPoint]) -> float:
    """Median of the slopes between all pairs: right with up to 29 % of outliers (Sen, 1968)."""
    return median(list(_slopes(blocks)))


def _slopes(blocks: list[GrowthPoint]) -> Iterator[float]:
    for index, later in enumerate(blocks):
        for earlier in blocks[:index]:
            if later.step > earlier.step:
                yield (later.value - earlier.value) / (later.step - earlier.step)


def _every_part_grows(blocks: list[GrowthPoint], config: MemoryLeakConfig) -> bool:
    size = len(blocks) // PARTS
    starts = range(len(blocks) - size * PARTS, len(blocks), size)
    first, last = _middle(blocks, starts[0], size), _middle(blocks, starts[-1], size)
    total = last - first
    if total <= 0:
        return False
    parts = [first, *[_middle(blocks, start, size) for start in starts[1:-1]], last]
    rises = [after - before for before, after in pairwise(parts)]
    if min(rises) < config.min_part * total / len(rises):
        return False
    # A cache that fills slows down; what leaks does not.
    return sum(rises[-2:]) >= config.min_late * sum(rises[:2])


def _middle(blocks: list[GrowthPoint], start: int, size: int) -> float:
    return median([block.value for block in blocks[start : start + size]])
