"""Turns a job's steps into samples: after warm-up, corrected for work, short steps in groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from warpwatch_detection.detector import WARMUP_STEPS, JobStep
from warpwatch_detection.signals.medians import SIGMA_PER_MAD

# Older steps count less: about the last 500 decide.
MEMORY = 0.998
# Work explains nothing before its relative squared changes reach this sum.
MIN_SQUARES = 0.01
# A change of time beyond this part of the step is a pause, and is not learned.
MAX_CHANGE = 0.7
# Weight of a new step in the level that the slope is relative to.
LEVEL_WEIGHT = 0.02
# Attention alone grows with the square of the length.
MAX_SLOPE = 2.0
MIN_FACTOR = 0.05


@dataclass(slots=True)
class StepWork:
    """A model of step time: level * (1 + slope * (work / typical - 1)).

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
        """Return the part of log(``time_s``) that work explains; 0 if it is even or not counted."""
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
        """Move the level towards a step's time without its work; cut what is far from it."""
        cut_s = min(max(level_s, 0.5 * self.level_s), 2.0 * self.level_s)
        self.level_s += LEVEL_WEIGHT * (cut_s - self.level_s)


# Warm-up ends when two neighbouring groups of this many steps agree ...
SETTLE_STEPS = 10
SETTLED = 0.05
SETTLED_ERRORS = 3.0 * 1.25 * math.sqrt(2.0 / SETTLE_STEPS)
# If the start is not stable after this many more steps, it is used as it is.
MAX_SETTLE_STEPS = 200
# Shorter steps are evaluated in groups of about this time: the operating system's scheduling costs
# milliseconds, which hardly matter in a tenth of a second.
SAMPLE_S = 0.1
MAX_GROUP = 1000


@dataclass(slots=True)
class StepSignal:
    """The samples of one job. group: the steps in a sample, 0 while the job warms up.

    sample_s: the length of a sample; first_step: of the newest group.
    """

    work: StepWork = field(default_factory=StepWork)
    start: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    group: int = 0
    sample_s: float = 0.0
    first_step: int = 0

    def add(self, seen: JobStep, time_s: float) -> float | None:
        """Return the log of a sample's time in seconds if the step completes a sample."""
        if seen.index < WARMUP_STEPS or time_s <= 0:
            return None
        value = math.log(time_s) - self.work.explained(seen, time_s)
        if not self.group:
            self._settle(value, given_up=seen.index >= WARMUP_STEPS + MAX_SETTLE_STEPS)
            return None
        if not self.values:
            self.first_step = seen.step
        self.values.append(value)
        if len(self.values) < self.group:
            return None
        sample = median(self.values)
        self.values.clear()
        return sample

    def window_of(self, seconds: float) -> int:
        """Return the number of samples that last at least ``seconds``."""
        return math.ceil(seconds / self.sample_s) if self.sample_s > 0 else 1

    def _settle(self, value: float, given_up: bool) -> None:
        start = self.start
        start.append(value)
        if len(start) < 2 * SETTLE_STEPS:
            return
        older, newer = start[:SETTLE_STEPS], start[SETTLE_STEPS:]
        center = median(newer)
        noise = SIGMA_PER_MAD * median([abs(each - center) for each in newer])
        change = abs(center - median(older))
        if change <= max(SETTLED, SETTLED_ERRORS * noise) or given_up:
            step_s = max(math.exp(center), 1e-6)
            self.group = max(1, min(int(SAMPLE_S / step_s), MAX_GROUP))
            self.sample_s = self.group * step_s
            start.clear()
        else:
            del start[:SETTLE_STEPS]
