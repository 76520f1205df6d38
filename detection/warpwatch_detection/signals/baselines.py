"""Medians of a few values and of sliding windows, and baselines that are learned and frozen."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

# A normal distribution's standard deviation over its median absolute deviation.
SIGMA_PER_MAD = 1.4826
# The median of n normal values varies by √(π/2) deviations over √n; the quartiles of a normal
# distribution are 1.349 deviations apart.
ERROR_PER_QUARTILES = 1.2533 / 1.349


def medians_without_one(ordered: Sequence[float]) -> tuple[float, float, float, float]:
    """Return the middle value, and the medians without a value below, at and above it.

    There must be two values. All values below the middle leave the same median, and so do all above
    it.
    """
    half, is_even = divmod(len(ordered) - 1, 2)
    middle, above = ordered[half], ordered[half + 1]
    if is_even:
        return middle, above, above, middle
    below = ordered[half - 1]
    return middle, (middle + above) / 2, (below + above) / 2, (below + middle) / 2


def median_of_others(ordered: Sequence[float], own: float) -> float:
    """Return the median without one value, ``own``; infinite if there is no other value."""
    if len(ordered) < 2:
        return math.inf
    middle, of_lower, of_middle, of_upper = medians_without_one(ordered)
    return of_lower if own < middle else of_upper if own > middle else of_middle


@dataclass(slots=True)
class SlidingMedian:
    """The last ``size`` values, as a ring and in order; adding one takes two binary searches."""

    size: int
    recent: list[float] = field(default_factory=list)
    ordered: list[float] = field(default_factory=list)
    oldest: int = 0

    def add(self, value: float) -> None:
        recent, ordered = self.recent, self.ordered
        if len(recent) < self.size:
            recent.append(value)
        else:
            oldest = self.oldest
            del ordered[bisect_left(ordered, recent[oldest])]
            recent[oldest] = value
            self.oldest = (oldest + 1) % self.size
        insort(ordered, value)

    def clear(self) -> None:
        self.recent.clear()
        self.ordered.clear()
        self.oldest = 0

    @property
    def newest(self) -> float:
        return self.recent[self.oldest - 1]

    @property
    def full(self) -> bool:
        return len(self.recent) == self.size

    def median(self) -> float:
        ordered = self.ordered
        half = len(ordered) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2

    def upper_quartile(self) -> float:
        return self.ordered[len(self.ordered) * 3 // 4]

    def error(self) -> float:
        """Return the median's standard error, for independent and about normal values."""
        count = len(self.ordered)
        lower_quartile = self.ordered[count // 4]
        return ERROR_PER_QUARTILES * (self.upper_quartile() - lower_quartile) / math.sqrt(count)


# A normal distribution's standard deviation over the 90th percentile of its absolute values.
SIGMA_PER_P90 = 1 / 1.645
# The present noise is that of this many differences of neighbouring blocks.
RECENT_DIFFERENCES = 40
# Slow wandering is learned from every fourth block: from 10 to 40 of them, so that a fault is found
# before it is in most of them.
WANDER_BLOCKS = 4
MAX_WANDER = 40
MIN_WANDER = 10
# The spread of few blocks is uncertain. It is widened by this over their number: 1.8 times for 5
# and 1.2 times for 20 blocks, as Student's t at 1 % exceeds the normal distribution.
DOUBT = 4.0
# After this many blocks a lower level is the new normal: an improvement needs no alarm.
LOWER_BLOCKS = 15
MAX_RESTARTS = 3
# A rank's noise counts up to this many times its peers': more is a fault of its own, which must not
# become its normal.
PEER_FACTOR = 3.0


@dataclass(slots=True)
class FrozenBaseline:
    """The center and spread (one standard deviation) of a value's healthy blocks.

    The center is learned from the first blocks and then frozen, because a rolling baseline would
    absorb a slow drift. Later blocks change only the spread.

    blocks_spread, wander_spread: spreads of ``blocks`` and ``wander``.
    """

    min_spread: float
    center: float = 0.0
    spread: float = 0.0
    blocks: list[float] = field(default_factory=list)
    blocks_spread: float = 0.0
    differences: SlidingMedian = field(default_factory=lambda: SlidingMedian(RECENT_DIFFERENCES))
    last: float | None = None
    lower: list[float] = field(default_factory=list)
    learned: int = 0
    wander: list[float] = field(default_factory=list)
    wander_spread: float = 0.0
    restarts: int = 0

    def begin_again(self, block: float, jump: float) -> None:
        """Discard the learned blocks if ``block`` is more than ``jump`` from their center.

        Two levels in one baseline would make a limit that nothing exceeds. This happens at most
        MAX_RESTARTS times: if the value goes on jumping, that is its noise.
        """
        if self.blocks and self.restarts < MAX_RESTARTS and abs(block - self.center) > jump:
            self.restarts += 1
            self.blocks.clear()
            self.wander.clear()
            self.differences.clear()
            self.last = None

    def learn(self, block: float, size: int) -> None:
        """Learn a healthy block; the center is that of the first ``size`` blocks."""
        self.lower.clear()
        if self.last is not None:
            self.differences.add(abs(block - self.last))
        self.last = block
        self.learned += 1
        if self.learned % WANDER_BLOCKS == 0:
            self.wander = [*self.wander[1 - MAX_WANDER :], block]
            if len(self.wander) >= MIN_WANDER:
                self.wander_spread = spread_of(self.wander)
        if len(self.blocks) < size:
            self.blocks.append(block)
            self.blocks_spread = spread_of(self.blocks)
            self.center = median(self.blocks)
        spread = max(self.blocks_spread, self._recent_spread(), self.min_spread)
        if len(self.wander) >= MIN_WANDER:
            spread = max(spread, self.wander_spread)
        self.spread = spread * (1 + DOUBT / len(self.blocks))

    def learn_lower(self, block: float, size: int) -> None:
        """Add a block clearly below the center; LOWER_BLOCKS in a row are the new blocks."""
        self.lower.append(block)
        if len(self.lower) >= LOWER_BLOCKS:
            blocks, self.lower = self.lower, []
            self.blocks.clear()
            self.wander.clear()
            self.last = None
            for lower in blocks:
                self.learn(lower, size)

    def shift(self, amount: float) -> None:
        """Move all levels by ``amount``, as the value has another zero now."""
        self.center += amount
        self.blocks = [block + amount for block in self.blocks]
        self.wander = [block + amount for block in self.wander]
        self.last = None

    def _recent_spread(self) -> float:
        """Return the noise of one value: the spread of recent differences divided by √2."""
        ordered = self.differences.ordered
        count = len(ordered)
        if not count:
            return 0.0
        usual = SIGMA_PER_MAD * self.differences.median()
        rare = SIGMA_PER_P90 * ordered[count * 9 // 10] if count >= 10 else 0.0
        return max(usual, rare) / math.sqrt(2)


def spread_of(blocks: list[float]) -> float:
    """Return a robust standard deviation, at least half of the plain one: two modes are noise."""
    center = median(blocks)
    offsets = [block - center for block in blocks]
    deviation: float = (sum(offset * offset for offset in offsets) / len(blocks)) ** 0.5
    return max(SIGMA_PER_MAD * median([abs(offset) for offset in offsets]), 0.5 * deviation)
