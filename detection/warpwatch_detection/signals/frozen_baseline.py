"""The level and noise of one rank's value in health: learned from first blocks, then frozen.

A baseline that rolled on would absorb a slow drift; only the noise goes on being learned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

from warpwatch_detection.signals.medians import SIGMA_PER_MAD, SlidingMedian

# A normal distribution's standard deviation over the 90th percentile of its absolute values.
SIGMA_PER_P90 = 1 / 1.645
# Neighbouring blocks' differences, which say how noisy the value is now.
RECENT_DIFFERENCES = 40
# Slow wandering shows in every fourth block, of which at most 40 are kept and 10 suffice. A
# fault is found before most of them have seen it.
WANDER_BLOCKS = 4
MAX_WANDER = 40
MIN_WANDER = 10
# The spread of a few blocks is too small as often as too large: it is widened by this over their
# number, to 1.8 times for 5 and 1.2 for 20, as much as Student's t at 1 % exceeds the normal.
DOUBT = 4.0
# A level that stayed lower for this many blocks is the new normal: better needs no alarm.
LOWER_BLOCKS = 15
MAX_RESTARTS = 3
# A rank's noise counts up to this many times its peers': more is a fault of its own, which must not
# become its normal.
PEER_FACTOR = 3.0
SQRT_2 = 2**0.5


@dataclass(slots=True)
class FrozenBaseline:
    """The center and spread (one standard deviation) of a value's healthy blocks.

    blocks_spread, wander_spread: spreads of ``blocks`` and ``wander``. imposed: the center was
    given, not learned.
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
        """While it is learned: what was learned goes if ``block`` is more than ``jump`` from it.

        Two levels in one baseline would make a limit that nothing passes. A few times only: a
        value that jumps for ever is as noisy as that.
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
    """Robust standard deviation, but at least half of the plain one: two modes are noise too."""
    center = median(blocks)
    offsets = [block - center for block in blocks]
    deviation: float = (sum(offset * offset for offset in offsets) / len(blocks)) ** 0.5
    return max(SIGMA_PER_MAD * median([abs(offset) for offset in offsets]), 0.5 * deviation)
