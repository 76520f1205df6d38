"""How a job's step time follows the tokens (or samples) of the step, learned as it runs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from warpwatch_detection.detector import JobStep

# Older steps count less: about the last 500 decide.
MEMORY = 0.998
# Relative squared change of work that must have been seen before it explains anything.
MIN_SQUARES = 0.01
# A change of time beyond this part of the step is a pause and teaches nothing.
MAX_CHANGE = 0.7
# Weight of a new step in the level that the slope is relative to.
LEVEL_WEIGHT = 0.02
# Attention alone grows with the square of the length.
MAX_SLOPE = 2.0
MIN_FACTOR = 0.05


@dataclass(slots=True)
class StepWork:
    """time = level * (1 + slope * (work / typical - 1)): a fixed part and one that follows work.

    The slope is fitted by least squares to the differences of successive steps, which neither a
    level shift nor a drift changes. typical: the work of the first step.
    """

    typical: float = 0.0
    level_s: float = 0.0
    products: float = 0.0
    squares: float = 0.0
    last_work: float = 0.0
    last_s: float = 0.0

    def explained(self, seen: JobStep, time_s: float) -> float:
        """What work adds to the log of ``time_s``; 0 where no work is counted or it is even."""
        work = seen.work
        if not work:
            return 0.0
        if not self.typical:
            self.typical, self.level_s = work, time_s
            self.last_work, self.last_s = 1.0, time_s
        work /= self.typical
        if work == self.last_work and not self.squares:
            self.last_s = time_s
            self._follow(time_s)
            return 0.0
        slope = 0.0
        if self.squares >= MIN_SQUARES:
            slope = min(max(self.products / self.squares / self.level_s, 0.0), MAX_SLOPE)
        factor = max(1.0 + slope * (work - 1.0), MIN_FACTOR)
        self._learn(work, time_s, factor)
        return math.log(factor)

    def _learn(self, work: float, time_s: float, factor: float) -> None:
        change, slower_s = work - self.last_work, time_s - self.last_s
        self.last_work, self.last_s = work, time_s
        if abs(slower_s) < MAX_CHANGE * self.level_s:
            self.squares = MEMORY * self.squares + change * change
            self.products = MEMORY * self.products + change * slower_s
        self._follow(time_s / factor)

    def _follow(self, level_s: float) -> None:
        """A step that took ``level_s`` but for its work moves the level; a slow one a little."""
        cut_s = min(max(level_s, 0.5 * self.level_s), 2.0 * self.level_s)
        self.level_s += LEVEL_WEIGHT * (cut_s - self.level_s)
