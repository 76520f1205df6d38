"""Learns the healthy level and noise of one rank's value from its first blocks, then freezes them.

A rolling baseline would absorb a slow drift, so later blocks change only the noise.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from warpwatch_detection.signals.medians import SIGMA_PER_MAD, SlidingMedian

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
SQRT_2 = 2**0.5


@dataclass(slots=True)
class FrozenBaseline:
    """The center and spread (one standard deviation) of a value's healthy blocks.

    blocks_spread, wander_spread: spreads of ``blocks`` and ``wander``. imposed: the center was set
    by ``impose``, not learned.
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
    imposed: bool = False
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
            if not self.imposed:
                self.center = median(self.blocks)
        spread = max(self.blocks_spread, self._recent_spread(), self.min_spread)
        if len(self.wander) >= MIN_WANDER:
            spread = max(spread, self.wander_spread)
        self.spread = spread * (1 + DOUBT / len(self.blocks))

    def learn_lower(self, block: float, size: int) -> None:
        """Learn a block clearly below the center."""
        self.lower.append(block)
        if len(self.lower) >= LOWER_BLOCKS:
            blocks, self.lower = self.lower, []
            self.blocks.clear()
            self.wander.clear()
            self.imposed = False
            self.last = None
            for lower in blocks:
                self.learn(lower, size)

    def shift(self, amount: float) -> None:
        """Move all levels by ``amount``, as the value has another zero now."""
        self.center += amount
        self.blocks = [block + amount for block in self.blocks]
        self.wander = [block + amount for block in self.wander]
        self.last = None

    def impose(self, center: float) -> None:
        """Set the center, as the learned blocks were not healthy."""
        self.center = center
        self.imposed = True

    def _recent_spread(self) -> float:
        """Return the noise of one value: the spread of recent differences divided by √2."""
        ordered = self.differences.ordered
        count = len(ordered)
        if not count:
            return 0.0
        usual = SIGMA_PER_MAD * self.differences.median()
        rare = SIGMA_PER_P90 * ordered[count * 9 // 10] if count >= 10 else 0.0
        return max(usual, rare) / SQRT_2


def spread_of(blocks: list[float]) -> float:
    """Return a robust standard deviation, at least half of the plain one: two modes are noise."""
    center = median(blocks)
    offsets = [block - center for block in blocks]
    deviation: float = (sum(offset * offset for offset in offsets) / len(blocks)) ** 0.5
    return max(SIGMA_PER_MAD * median([abs(offset) for offset in offsets]), 0.5 * deviation)
