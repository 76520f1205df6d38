"""Detects a slow rise of the job's step time, which is too slow for a level shift."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from warpwatch_detection.budget import FALSE_ALARMS_PER_JOB_DAY, rate_per_s
from warpwatch_detection.detector import Cleared, DetectorStatus, JobDetector, JobStep, Results
from warpwatch_detection.detectors.level_shifts import ACCEPT_AFTER_S, EFFECT
from warpwatch_detection.signals.level_shift import LevelShift, Rise, level
from warpwatch_detection.signals.step_signal import StepSignal
from warpwatch_telemetry.anomalies import Detected

# Jobs settle by 5 % in their first 400 steps.
DRIFT_EFFECT = 0.06
# The samples in a block; the following numbers are blocks.
BLOCK = 20
# The present level is compared with the level of 260 to 600 samples ago.
NOW = 5
OLDER_FROM, OLDER_TO = 30, 13
MIN_OLDER = 8
# The level after warm-up is learned from this many blocks and then frozen; a rolling one would
# absorb a rise that takes longer than it remembers. It is compared with as long a level of now, and
# must have risen by 10 %, however long it took.
ANCHOR = 20
ANCHOR_NOW = 10
ANCHOR_EFFECT = 0.10
# A rise is not a drift if more than this share of it came within NOW blocks.
SUDDEN_SHARE = 0.75
# A level shift is another detector's: after one, the drift is sought from the start. It may be
# found later here, in windows of at least these samples and seconds.
SHORTEST_WINDOW = 24
SHORTEST_WINDOW_S = 1.0


@dataclass(slots=True)
class DriftJob:
    """Logs of seconds. blocks: the newest levels; first_steps: the first step of each.

    anchor: the sum of the first ``anchored`` blocks. difference, limit: at the newest block. rise:
    the rise that lasts, if there is one.
    """

    index: int = -1
    signal: StepSignal = field(default_factory=StepSignal)
    shifts: LevelShift = field(default_factory=LevelShift)
    block: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    first_steps: list[int] = field(default_factory=list)
    anchor: float = 0.0
    anchored: int = 0
    anchor_step: int = 0
    rise: Rise | None = None
    difference: float = 0.0
    limit: float = math.inf
    nearest: float = 0.0
    nearest_step: int | None = None

    @property
    def on(self) -> bool:
        return self.rise is not None

    def add_block(self) -> None:
        self.blocks = [*self.blocks[1 - OLDER_FROM :], level(self.block)]
        self.first_steps = self.first_steps[-OLDER_FROM:]
        self.block.clear()
        if self.anchored < ANCHOR:
            if not self.anchored:
                self.anchor_step = self.first_steps[-1]
            self.anchor += self.blocks[-1]
            self.anchored += 1


class StepDrift(JobDetector[DriftJob]):
    kind = "step_drift"
    job_type = DriftJob

    def __init__(self, false_alarms_per_job_day: float = FALSE_ALARMS_PER_JOB_DAY) -> None:
        super().__init__(false_alarms_per_job_day)
        # A level shift that step_regression finds is not a drift.
        self._shifts_per_s = rate_per_s("step_regression", false_alarms_per_job_day)

    def judge(self, job: DriftJob, seen: JobStep) -> Results:
        value = job.signal.add(seen, seen.common_s)
        if value is None:
            return ()
        job.shifts.samples.add(value)
        if not job.shifts.least_window:
            shortest = job.signal.window_of(SHORTEST_WINDOW_S)
            job.shifts.least_window = max(SHORTEST_WINDOW, shortest)
        if job.shifts.judge(self._shifts_per_s * job.signal.sample_s) is not None:
            return self._restart(job, seen)
        if not job.block:
            job.first_steps.append(job.signal.first_step)
        job.block.append(value)
        return self._end_block(job, seen) if len(job.block) == BLOCK else ()

    @staticmethod
    def _restart(job: DriftJob, seen: JobStep) -> Results:
        was_on = job.on
        job.rise, job.anchor, job.anchored = None, 0.0, 0
        job.block.clear()
        job.blocks.clear()
        job.first_steps.clear()
        return (Cleared(seen.time, seen.job_id),) if was_on else ()

    def _end_block(self, job: DriftJob, seen: JobStep) -> Results:
        job.add_block()
        if job.rise is not None:
            return self._go_on(job, job.rise, seen)
        job.rise = self._risen(job, seen)
        return () if job.rise is None else (self._found(job, job.rise, seen),)

    def _risen(self, job: DriftJob, seen: JobStep) -> Rise | None:
        """Return the rise since the older blocks or since the start, if it exceeds its limit."""
        noise = job.shifts.deviation(self._rate_per_s * job.signal.sample_s)
        older = job.blocks[-OLDER_FROM:-OLDER_TO]
        if len(older) < MIN_OLDER or not math.isfinite(noise):
            return None
        before, begin = mean(older), job.first_steps[-OLDER_TO]
        job.difference = mean(job.blocks[-NOW:]) - before
        job.limit = max(DRIFT_EFFECT, noise)
        if job.anchored == ANCHOR:
            anchor, late = job.anchor / ANCHOR, mean(job.blocks[-ANCHOR_NOW:])
            limit = max(ANCHOR_EFFECT, noise)
            if (late - anchor) / limit > job.difference / job.limit:
                job.difference, job.limit = late - anchor, limit
                before, begin = anchor, job.anchor_step
        if job.difference / job.limit > job.nearest:
            job.nearest, job.nearest_step = job.difference / job.limit, seen.step
        is_sudden = steepest(job.blocks) > SUDDEN_SHARE * job.difference
        if job.difference < job.limit or is_sudden:
            return None
        return Rise(seen.time, begin, before, job.difference)

    def _go_on(self, job: DriftJob, rise: Rise, seen: JobStep) -> Results:
        rise.samples += BLOCK
        is_accepted = rise.is_accepted(seen.time, ACCEPT_AFTER_S)
        if is_accepted or rise.is_over(mean(job.blocks[-NOW:])):
            return self._restart(job, seen)
        return (self._found(job, rise, seen),)

    @staticmethod
    def _found(job: DriftJob, rise: Rise, seen: JobStep) -> Detected:
        value_s, baseline_s = math.exp(mean(job.blocks[-NOW:])), math.exp(rise.baseline)
        return seen.found(
            begin_step=rise.begin_step,
            value=value_s,
            baseline=baseline_s,
            summary=f"steps have slowly become {100 * (value_s / baseline_s - 1):.0f} % longer "
            f"since about step {rise.begin_step}: {value_s:.3g} s instead of {baseline_s:.3g} s",
        )

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            if not math.isfinite(job.limit):
                text = f"{len(job.blocks)} blocks of {BLOCK} samples, too few for a slow rise"
                yield DetectorStatus("learning", text, **name.fields())
                continue
            yield DetectorStatus(
                answer="found" if job.on else "fine",
                text=f"slow rise of the steps {100 * job.difference:+.1f} %, "
                f"limit {100 * job.limit:.1f} %",
                **name.fields(),
                value=job.difference,
                baseline=0.0,
                limit=job.limit,
                nearest=job.nearest,
                nearest_step=job.nearest_step,
                sees=math.expm1(min(job.limit, 10.0)),
                effect=EFFECT,
            )


def steepest(blocks: list[float]) -> float:
    """Return the largest rise from ``NOW`` blocks to the next ``NOW``, since the older level."""
    last = len(blocks)
    return max(
        mean(blocks[at : at + NOW]) - mean(blocks[at - NOW : at])
        for at in range(max(NOW, last - OLDER_TO), last - NOW + 1)
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
