"""From steps to samples: after warm-up, evened out by their work, very short steps in groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from warpwatch_detection.config_steps import StepSignalConfig
from warpwatch_detection.detectors.base import JobStep
from warpwatch_detection.detectors.level import SIGMA_PER_MAD, median
from warpwatch_detection.detectors.level_shift import LevelShift
from warpwatch_detection.detectors.step_work import StepWork

# Warm-up ends when two neighbouring groups of so many steps agree ...
SETTLE_STEPS = 10
# ... within 5 %, or within three standard errors of their medians (1.25 sigma / sqrt(n) each).
SETTLED = 0.05
SETTLED_ERRORS = 3.0 * 1.25 * math.sqrt(2.0 / SETTLE_STEPS)
# A group of steps is bounded, however short they are.
MAX_GROUP = 1000
# Every so many samples detectors look whether theirs are the same; then they remain so.
SHARE_SAMPLES = 20


class HasShifts(Protocol):
    """What a detector of shifts remembers of a job."""

    signal: StepSignal
    shifts: LevelShift


@dataclass(slots=True)
class StepSignal:
    """One job's. group: steps that make a sample, 0 while the job warms up.

    sample_s: how long one lasts; first_step: of the newest group. index: of the newest step;
    sample: that it completed.
    """

    work: StepWork = field(default_factory=StepWork)
    start: list[float] = field(default_factory=list)
    values: list[float] = field(default_factory=list)
    group: int = 0
    sample_s: float = 0.0
    first_step: int = 0
    index: int = -1
    sample: float | None = None

    def add(self, seen: JobStep, time_s: float, config: StepSignalConfig) -> float | None:
        """The log of a sample's time (of seconds), when the step completes one.

        Asked again for the same step, the same.
        """
        if seen.index == self.index:
            return self.sample
        self.index, self.sample = seen.index, None
        if seen.index < config.warmup_steps or time_s <= 0:
            return None
        value = math.log(time_s) - self.work.explained(seen, time_s)
        if not self.group:
            self._settle(seen, value, config)
            return None
        if self.group == 1:
            self.first_step, self.sample = seen.step, value
        else:
            self.sample = self._end_of_group(seen, value)
        return self.sample

    def _end_of_group(self, seen: JobStep, value: float) -> float | None:
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

    def _settle(self, seen: JobStep, value: float, config: StepSignalConfig) -> None:
        start = self.start
        start.append(value)
        if len(start) < 2 * SETTLE_STEPS:
            return
        older, newer = start[:SETTLE_STEPS], start[SETTLE_STEPS:]
        center = median(newer)
        noise = SIGMA_PER_MAD * median([abs(each - center) for each in newer])
        change = abs(center - median(older))
        given_up = seen.index >= config.warmup_steps + config.settle_steps
        if change <= max(SETTLED, SETTLED_ERRORS * noise) or given_up:
            step_s = max(math.exp(center), 1e-6)
            self.group = max(1, min(int(config.sample_s / step_s), MAX_GROUP))
            self.sample_s = self.group * step_s
            start.clear()
        else:
            del start[:SETTLE_STEPS]


def add_common(job: HasShifts, seen: JobStep, config: StepSignalConfig) -> float | None:
    """The job's common time as the signal; a sample of it goes to where shifts are sought.

    Detectors whose signals are the same, sample for sample, have them in common.
    """
    signal, samples = job.signal, job.shifts.samples
    value = signal.add(seen, seen.common_s, config)
    if value is not None:
        samples.add(value, seen.index)
        if samples.count % SHARE_SAMPLES == 0:
            job.signal = seen.share("common_signal", signal)
            job.shifts.samples = seen.share("common_samples", samples)
    return value
