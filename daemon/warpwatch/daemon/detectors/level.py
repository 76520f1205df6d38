"""Levels of a noisy signal: block medians, a baseline that knows its own noise, persistence.

Noise is measured at the scale that is tested: the spread of past block medians, so the
autocorrelation of step times is paid for (docs/detection.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

# A normal distribution's standard deviation over its median absolute deviation.
SIGMA_PER_MAD = 1.4826
# Near-constant series have no MAD; no step time is known better than this.
MIN_RELATIVE_SPREAD = 0.004
# Successive differences that tell how noisy the signal is now.
RECENT_BLOCKS = 40
# A block ends at this many steps whatever time it spans: memory is bounded.
MAX_BLOCK_STEPS = 200


def median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2


class Baseline:
    """The level of a signal in health, from its first ``size`` healthy blocks, then frozen.

    Usable from ``ready_blocks`` on. A rolling baseline would absorb a slow rise; so only the
    noise goes on being learned, from differences between neighbours, which a rise hardly moves.
    """

    def __init__(self, size: int, ready_blocks: int) -> None:
        self._size = size
        self._ready_blocks = ready_blocks
        self._blocks: list[float] = []
        self._differences: deque[float] = deque(maxlen=RECENT_BLOCKS)
        self._last: float | None = None
        self.center = 0.0
        self._frozen_spread = 0.0
        self.spread = 0.0

    @property
    def ready(self) -> bool:
        return len(self._blocks) >= self._ready_blocks

    def add(self, block: float) -> None:
        if self._last is not None:
            self._differences.append(abs(block - self._last))
        self._last = block
        if len(self._blocks) < self._size:
            self._blocks.append(block)
            self.center = median(self._blocks)
            self._frozen_spread = _spread(self._blocks, self.center)
        noise = SIGMA_PER_MAD * median(self._differences) / 2**0.5 if self._differences else 0.0
        self.spread = max(self._frozen_spread, noise, MIN_RELATIVE_SPREAD * abs(self.center))

    def restart(self, blocks: Sequence[float]) -> None:
        """A new normal: what was learned of the old level goes."""
        self._blocks.clear()
        self._differences.clear()
        self._last = None
        for block in blocks:
            self.add(block)


def _spread(blocks: Sequence[float], center: float) -> float:
    """Robust standard deviation, at least half of the plain one: two modes are noise too."""
    mad = median([abs(block - center) for block in blocks])
    variance = sum((block - center) ** 2 for block in blocks) / len(blocks)
    return float(max(SIGMA_PER_MAD * mad, 0.5 * variance**0.5))


class Persistence:
    """On after ``hold`` excesses in a row that span ``hold_s``, off after ``release`` returns."""

    def __init__(self, hold: int, hold_s: float = 0.0, release: int = 2) -> None:
        self._hold = hold
        self._hold_s = hold_s
        self._release = release
        self.count = 0
        self._lasted_s = 0.0
        self._calm = 0
        self.on = False
        self.begin_step = 0

    def update(self, excess: float, span: BlockSpan) -> bool:
        """``excess``: the rise over its limit, 1 at the limit; ``span``: the block's."""
        if excess >= 1.0:
            if self.count == 0 and not self.on:
                self.begin_step = span.first_step
            self.count += 1
            self._lasted_s += span.elapsed_s
            self._calm = 0
            lasting = self.count >= self._hold and self._lasted_s >= self._hold_s
            self.on = self.on or lasting
        else:
            self.count = 0
            self._lasted_s = 0.0
            self._calm = self._calm + 1 if excess < 0.5 else 0
            if self._calm >= self._release:
                self.on = False
        return self.on

    def reset(self) -> None:
        self.count = self._calm = 0
        self._lasted_s = 0.0
        self.on = False


class BlockSpan:
    """Says when a block of steps is full: enough steps and enough seconds."""

    def __init__(self, steps: int, seconds: float) -> None:
        self._steps = steps
        self._seconds = seconds
        self.count = 0
        self.elapsed_s = 0.0
        self.first_step = 0

    def add(self, step: int, duration_s: float) -> bool:
        if self.count == 0:
            self.first_step = step
        self.count += 1
        self.elapsed_s += duration_s
        return (
            self.count >= self._steps and self.elapsed_s >= self._seconds
        ) or self.count >= MAX_BLOCK_STEPS

    def restart(self) -> None:
        self.count = 0
        self.elapsed_s = 0.0
