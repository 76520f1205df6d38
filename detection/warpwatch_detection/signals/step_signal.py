"""From steps to samples: after warm-up, corrected for their work, very short steps in groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median

from warpwatch_detection.detector import WARMUP_STEPS, JobStep
from warpwatch_detection.signals.medians import SIGMA_PER_MAD
from warpwatch_detection.signals.step_work import StepWork

# Warm-up ends when two neighbouring groups of so many steps agree ...
SETTLE_STEPS = 10
# ... within 5 %, or within three standard errors of their medians (1.25 sigma / sqrt(n) each).
SETTLED = 0.05
SETTLED_ERRORS = 3.0 * 1.25 * math.sqrt(2.0 / SETTLE_STEPS)
# A start that is not stable after so many more steps is taken as it is.
MAX_SETTLE_STEPS = 200
# Shorter steps are judged by groups of about so long: scheduling of the operating system costs
# milliseconds, which are nothing in a tenth of a second.
SAMPLE_S = 0.1
# A group of steps is bounded, however short they are.
MAX_GROUP = 1000


@dataclass(slots=True)
class StepSignal:
    """One job's. group: steps that make a sample, 0 while the job warms up.

    sample_s: how long one lasts; first_step: of the newest group.
    """

    work: StepWork = field(default_factory=StepWork)
    start: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    group: int = 0
    sample_s: float = 0.0
    first_step: int = 0

    def add(self, seen: JobStep, time_s: float) -> float | None:
        """The log of a sample's time (of seconds), when the step completes one."""
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
        """Samples that last at least ``seconds``."""
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
