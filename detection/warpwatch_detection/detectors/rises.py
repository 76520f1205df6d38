"""Finds lasting rises of the step time (step_regression, step_drift) and of communication.

step_regression and comm_slow are level shifts; step_drift is a rise that is too slow for one.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from warpwatch_detection.detector import (
    FALSE_ALARMS_PER_JOB_DAY,
    DetectorStatus,
    JobIteration,
    JobStep,
    Nearest,
    Results,
    StepsDetector,
    Unjudged,
    changed,
    job_status,
    rate_per_s,
)
from warpwatch_detection.signals.level_shift import (
    LEAST_EFFECT,
    REFERENCE,
    LevelShift,
    Rise,
    Shift,
    SignalHistory,
    level,
)
from warpwatch_detection.signals.samples import IterationSignal, StepSignal
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.records import Serve

# A shorter rise is a hiccup of the machine.
LEAST_WINDOW_S = 1.0
# A detector that does not see a tenth is blind.
EFFECT = 0.10


@dataclass(slots=True)
class ShiftJob(Nearest):
    """One job with the search for shifts of its signal.

    index: the newest step's. beside: values of the kind, one for each of ``shifts.samples``.
    iterations: the signal of a server, empty in trainings. typical_s: the unit of the signal, if it
    has one. rise: the rise that lasts, or None; last_rise: the newest found.
    """

    index: int = -1
    signal: StepSignal = field(default_factory=StepSignal)
    iterations: IterationSignal = field(default_factory=IterationSignal)
    shifts: LevelShift = field(default_factory=LevelShift)
    beside: list[float] = field(default_factory=list)
    typical_s: float = 0.0
    rise: Rise | None = None
    last_rise: Rise | None = None
    unjudged: Unjudged = field(default_factory=Unjudged)

    @property
    def on(self) -> bool:
        return self.rise is not None


class ShiftDetector(StepsDetector[ShiftJob]):
    """The base of detectors of level shifts, which define the signal and confirm its shifts."""

    # The name of the signal in a status.
    quantity: str
    state_of = ShiftJob

    @abstractmethod
    def sample(self, job: ShiftJob, seen: JobStep) -> float | None:
        """Return the sample that the step completes, or None."""

    def confirms(self, job: ShiftJob, shift: Shift) -> bool:
        """Return whether a rise is of this kind."""
        return True

    @abstractmethod
    def found(self, job: ShiftJob, rise: Rise, level: float, seen: JobStep) -> Detected:
        """Return the finding of a rise; ``level`` is the signal's present one."""

    def share(self, difference: float) -> float:
        """Return a difference of the signal as a share of the step."""
        return difference

    def evaluate(self, job: ShiftJob, seen: JobStep) -> Results:
        sample = self.sample(job, seen)
        if sample is None:
            return self.end_stale(seen)
        job.unjudged.end()
        least_window = job.signal.window_of(LEAST_WINDOW_S)
        shift = job.shifts.add(sample, self._rate_per_s * job.signal.sample_s, least_window)
        job.reach(job.shifts.nearest, seen.step)
        results: Results = ()
        if shift is not None and shift.difference > 0 and self.confirms(job, shift):
            results = self._begin(job, shift, seen)
        elif job.rise is not None:
            results = self._go_on(job, job.rise, seen)
        del job.beside[: -len(job.shifts.samples.values)]
        return results

    def _begin(self, job: ShiftJob, shift: Shift, seen: JobStep) -> Results:
        steps = (shift.window - 1) * job.signal.group
        begin_step = max(0, job.signal.first_step - steps)
        last, lasts = job.last_rise, job.rise is not None
        rise = Rise(seen.time, begin_step, shift.before, shift.difference)
        job.rise = job.last_rise = rise
        found = self.found(job, rise, shift.before + shift.difference, seen)
        # A rise from the level after the last rise is a second one, not the first again.
        is_second = last is not None and shift.before >= last.baseline + last.size / 2
        return (seen.cleared(for_good=is_second), found) if lasts or is_second else (found,)

    def _go_on(self, job: ShiftJob, rise: Rise, seen: JobStep) -> Results:
        level = rise.present(job.shifts)
        if level is None:
            return ()
        accepted = rise.is_accepted(seen.time)
        if accepted or rise.is_over(level):
            job.rise = None
            if accepted and job.iterations.bins:
                job.iterations.accept(level)
                job.shifts.samples, job.last_rise = SignalHistory(), None
            return (seen.cleared(for_good=accepted),)
        return (self.found(job, rise, level, seen),)

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            shifts = job.shifts
            if not shifts.ready:
                text = f"{len(shifts.samples.values)} samples seen, its noise is not known yet"
                yield job_status(name, False, text, learns=True)
                continue
            rate = self._rate_per_s * job.signal.sample_s
            difference, limit = self.share(shifts.difference), self.share(shifts.limit(rate))
            text = f"{self.quantity} {100 * difference:+.1f} % against the samples before, "
            text += f"limit {100 * limit:.1f} %"
            eyes = {"sees": self.share(shifts.least_limit(rate)), "effect": EFFECT}
            yield job_status(name, job.on, text, difference, limit, job, baseline=0.0, **eyes)


class StepRegression(ShiftDetector):
    """Evaluates the log of the common time: a shift is a ratio."""

    kind = "step_regression"
    quantity = "level of the steps"
    reads = (JobStep, JobIteration, Serve)

    def share(self, difference: float) -> float:
        # A limit learned from few values has no bound.
        return math.expm1(min(difference, 10.0))

    def sample(self, job: ShiftJob, seen: JobStep) -> float | None:
        if not isinstance(seen, JobIteration):
            return job.signal.add(seen, seen.common_s)
        of = job.iterations
        sample = of.add(seen, learns=not job.on)
        job.signal.group, job.signal.sample_s = of.group, of.sample_s
        job.signal.first_step = of.first_step
        return sample

    def found(self, job: ShiftJob, rise: Rise, level: float, seen: JobStep) -> Detected:
        # A server's signal is the ratio to the usual time of the same work.
        unit_s, what, work = 1.0, "steps", ""
        if isinstance(seen, JobIteration):
            unit_s, what, work = job.iterations.usual_s, "iterations", " for the same work"
        value_s, baseline_s = unit_s * math.exp(level), unit_s * math.exp(rise.baseline)
        text = (
            f"{what} take {100 * (value_s / baseline_s - 1):.0f} % longer{work} since {what[:-1]} "
            f"{rise.begin_step}: {value_s:.3g} s instead of {baseline_s:.3g} s"
        )
        return seen.found(text, value_s, baseline_s, begin_step=rise.begin_step)


# Networks that others use too wander by 10 %.
MIN_RISE = 0.2
# Below 2 % of the step, communication cannot be what slows a job.
MIN_COMM = 0.02
# Compute that rises by half as much or more is a job that changed altogether.
MAX_COMPUTE = 0.5


class CommSlow(ShiftDetector):
    """Evaluates the smallest comm of any rank, in shares of what the job computed after warm-up.

    The rank that is last waits for no other, so its comm is the cost of communication itself.
    ``job.beside`` is the log of the samples' compute, ``job.typical_s`` the compute after warm-up.
    """

    kind = "comm_slow"
    quantity = "communication, in shares of the step,"

    def sample(self, job: ShiftJob, seen: JobStep) -> float | None:
        comm_s = min(seen.comm_s.values(), default=0.0)
        compute_s = seen.common_s - comm_s
        if comm_s <= 0 or compute_s <= 0:
            return None
        log_compute = job.signal.add(seen, compute_s)
        if log_compute is None:
            return None
        if not job.typical_s:
            job.typical_s = job.signal.sample_s / job.signal.group
        job.beside.append(log_compute)
        return comm_s / job.typical_s

    def confirms(self, job: ShiftJob, shift: Shift) -> bool:
        if shift.before < MIN_COMM:
            return shift.difference >= MIN_COMM + LEAST_EFFECT
        rise = shift.difference / shift.before
        older = job.beside[-shift.window - REFERENCE : -shift.window]
        newer = job.beside[-shift.window :]
        compute_rise = level(newer) - level(older)
        return rise >= MIN_RISE and compute_rise < MAX_COMPUTE * math.log1p(rise)

    def found(self, job: ShiftJob, rise: Rise, level: float, seen: JobStep) -> Detected:
        value_s, baseline_s = level * job.typical_s, rise.baseline * job.typical_s
        text = (
            f"communication takes {value_s:.3g} s of a step on all ranks since step "
            f"{rise.begin_step} instead of {baseline_s:.3g} s, compute does not"
        )
        return seen.found(text, value_s, baseline_s, begin_step=rise.begin_step)


# --- slow rises ---

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
# After a level shift, which step_regression finds, a drift is searched for from the start. The
# shift may be found later here, in windows of at least these samples and seconds.
SHORTEST_WINDOW = 24
SHORTEST_WINDOW_S = 1.0


@dataclass(slots=True)
class DriftJob(Nearest):
    """One job; values are logs of seconds.

    blocks: the newest levels; first_steps: the first step of each. anchor: the sum of the first
    ``anchored`` blocks. difference, limit: at the newest block. rise: the rise that lasts, or None.
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

    @property
    def on(self) -> bool:
        return self.rise is not None

    def end_block(self) -> None:
        self.blocks = [*self.blocks[1 - OLDER_FROM :], level(self.block)]
        self.first_steps = self.first_steps[-OLDER_FROM:]
        self.block.clear()
        if self.anchored < ANCHOR:
            if not self.anchored:
                self.anchor_step = self.first_steps[-1]
            self.anchor += self.blocks[-1]
            self.anchored += 1


class StepDrift(StepsDetector[DriftJob]):
    kind = "step_drift"
    state_of = DriftJob

    def __init__(self, false_alarms_per_job_day: float = FALSE_ALARMS_PER_JOB_DAY) -> None:
        super().__init__(false_alarms_per_job_day)
        # A level shift that step_regression finds is not a drift.
        self._shifts_per_s = rate_per_s("step_regression", false_alarms_per_job_day)

    def evaluate(self, job: DriftJob, seen: JobStep) -> Results:
        value = job.signal.add(seen, seen.common_s)
        if value is None:
            return ()
        least_window = max(SHORTEST_WINDOW, job.signal.window_of(SHORTEST_WINDOW_S))
        if job.shifts.add(value, self._shifts_per_s * job.signal.sample_s, least_window):
            return self._restart(job, seen)
        if not job.block:
            job.first_steps.append(job.signal.first_step)
        job.block.append(value)
        if len(job.block) < BLOCK:
            return ()
        job.end_block()
        if job.rise is not None:
            return self._go_on(job, job.rise, seen)
        job.rise = self._risen(job, seen)
        return () if job.rise is None else (self._found(job, job.rise, seen),)

    @staticmethod
    def _restart(job: DriftJob, seen: JobStep) -> Results:
        was_on = job.on
        job.rise, job.anchor, job.anchored = None, 0.0, 0
        job.block.clear()
        job.blocks.clear()
        job.first_steps.clear()
        return changed(seen.job_id, seen.time, was_on, None)

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
        job.reach(job.difference / job.limit, seen.step)
        is_sudden = steepest(job.blocks) > SUDDEN_SHARE * job.difference
        if job.difference < job.limit or is_sudden:
            return None
        return Rise(seen.time, begin, before, job.difference)

    def _go_on(self, job: DriftJob, rise: Rise, seen: JobStep) -> Results:
        rise.samples += BLOCK
        if rise.is_accepted(seen.time) or rise.is_over(mean(job.blocks[-NOW:])):
            return self._restart(job, seen)
        return (self._found(job, rise, seen),)

    @staticmethod
    def _found(job: DriftJob, rise: Rise, seen: JobStep) -> Detected:
        value_s, baseline_s = math.exp(mean(job.blocks[-NOW:])), math.exp(rise.baseline)
        text = (
            f"steps have slowly become {100 * (value_s / baseline_s - 1):.0f} % longer since about "
            f"step {rise.begin_step}: {value_s:.3g} s instead of {baseline_s:.3g} s"
        )
        return seen.found(text, value_s, baseline_s, begin_step=rise.begin_step)

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            if not math.isfinite(job.limit):
                text = f"{len(job.blocks)} blocks of {BLOCK} samples, too few for a slow rise"
                yield job_status(name, False, text, learns=True)
                continue
            text = f"slow rise of the steps {100 * job.difference:+.1f} %, "
            text += f"limit {100 * job.limit:.1f} %"
            eyes = {"sees": math.expm1(min(job.limit, 10.0)), "effect": EFFECT}
            rise, limit = job.difference, job.limit
            yield job_status(name, job.on, text, rise, limit, job, baseline=0.0, **eyes)


def steepest(blocks: list[float]) -> float:
    """Return the largest rise from ``NOW`` blocks to the next ``NOW``, since the older level."""
    last = len(blocks)
    return max(
        mean(blocks[at : at + NOW]) - mean(blocks[at - NOW : at])
        for at in range(max(NOW, last - OLDER_TO), last - NOW + 1)
    )


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
