"""Finds lasting level shifts of step times (step_regression) and of communication (comm_slow)."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from warpwatch_detection.detector import (
    Cleared,
    DetectorStatus,
    JobDetector,
    JobIteration,
    JobStep,
    Results,
)
from warpwatch_detection.signals.equal_work import IterationSignal
from warpwatch_detection.signals.level_shift import (
    CLOSING_SAMPLES,
    LEAST_EFFECT,
    REFERENCE,
    LevelShift,
    Rise,
    Shift,
    level,
)
from warpwatch_detection.signals.step_signal import StepSignal
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId

# A shorter rise is a hiccup of the machine.
LEAST_WINDOW_S = 1.0
# A level that has lasted this time is the new normal: an operator has had time to look.
ACCEPT_AFTER_S = 600.0
# A detector that does not see a tenth is blind.
EFFECT = 0.10
# An open anomaly gets its newest numbers once per this many samples.
UPDATE_SAMPLES = 20


@dataclass(slots=True)
class ShiftJob:
    """index: the newest step's; beside: values of the kind, one for each of ``shifts.samples``.

    iterations: a server's, empty in trainings. typical_s: the unit of the signal, if it has one.
    rise: the rise that lasts, or None; last_rise: the newest found. nearest, nearest_step: the
    largest part of a limit that the job ever reached.
    """

    index: int = -1
    signal: StepSignal = field(default_factory=StepSignal)
    iterations: IterationSignal = field(default_factory=IterationSignal)
    shifts: LevelShift = field(default_factory=LevelShift)
    beside: list[float] = field(default_factory=list)
    typical_s: float = 0.0
    rise: Rise | None = None
    last_rise: Rise | None = None
    nearest: float = 0.0
    nearest_step: int | None = None

    @property
    def on(self) -> bool:
        return self.rise is not None


class ShiftDetector(JobDetector[ShiftJob]):
    """The base of detectors of level shifts, which define the signal and confirm its shifts."""

    judged: str

    job_type = ShiftJob

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

    def judge(self, job: ShiftJob, seen: JobStep) -> Results:
        sample = self.sample(job, seen)
        if sample is None:
            return ()
        job.shifts.samples.add(sample)
        if not job.shifts.least_window:
            job.shifts.least_window = job.signal.window_of(LEAST_WINDOW_S)
        shift = job.shifts.judge(self._rate_per_s * job.signal.sample_s)
        if shift is not None:
            job.iterations.work.level += shift.difference
        if job.shifts.nearest > job.nearest:
            job.nearest, job.nearest_step = job.shifts.nearest, seen.step
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
        if lasts or is_second:
            return (Cleared(seen.time, seen.job_id, for_good=is_second), found)
        return (found,)

    def _go_on(self, job: ShiftJob, rise: Rise, seen: JobStep) -> Results:
        rise.samples += 1
        if rise.samples % UPDATE_SAMPLES:
            return ()
        level = job.shifts.recent(CLOSING_SAMPLES)
        if rise.is_accepted(seen.time, ACCEPT_AFTER_S) or rise.is_over(level):
            job.rise = None
            return (Cleared(seen.time, seen.job_id),)
        return (self.found(job, rise, level, seen),)

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            yield self._status(name, job)

    def _status(self, name: JobId, job: ShiftJob) -> DetectorStatus:
        shifts = job.shifts
        if not shifts.ready:
            text = f"{len(shifts.samples.values)} samples seen, its noise is not known yet"
            return DetectorStatus("learning", text, **name.fields())
        rate = self._rate_per_s * job.signal.sample_s
        difference, limit = self.share(shifts.difference), self.share(shifts.limit(rate))
        text = (
            f"{self.judged} {100 * difference:+.1f} % against the samples before, "
            f"limit {100 * limit:.1f} %"
        )
        return DetectorStatus(
            answer="found" if job.on else "fine",
            text=text,
            **name.fields(),
            value=difference,
            baseline=0.0,
            limit=limit,
            nearest=job.nearest,
            nearest_step=job.nearest_step,
            sees=self.share(shifts.least_limit(rate)),
            effect=EFFECT,
        )


class StepRegression(ShiftDetector):
    """Judges the log of the common time: a shift is a ratio."""

    kind = "step_regression"
    judged = "level of the steps"
    reads = (JobStep, JobIteration)

    def share(self, difference: float) -> float:
        # A limit learned from few values has no bound.
        return math.expm1(min(difference, 10.0))

    def sample(self, job: ShiftJob, seen: JobStep) -> float | None:
        if not isinstance(seen, JobIteration):
            return job.signal.add(seen, seen.common_s)
        sample = job.iterations.add(seen, learns=not job.on)
        of, job.signal.group = job.iterations, job.iterations.group
        job.signal.sample_s, job.signal.first_step = of.sample_s, of.first_step
        return sample

    def found(self, job: ShiftJob, rise: Rise, level: float, seen: JobStep) -> Detected:
        # A server's signal is the ratio to the usual time of the same work.
        unit_s, what, work = 1.0, "steps", ""
        if isinstance(seen, JobIteration):
            unit_s, what, work = job.iterations.usual_s, "iterations", " for the same work"
        value_s, baseline_s = unit_s * math.exp(level), unit_s * math.exp(rise.baseline)
        return seen.found(
            begin_step=rise.begin_step,
            value=value_s,
            baseline=baseline_s,
            summary=f"{what} take {100 * (value_s / baseline_s - 1):.0f} % longer{work} since "
            f"{what[:-1]} {rise.begin_step}: {value_s:.3g} s instead of {baseline_s:.3g} s",
        )


# Networks that others use too wander by 10 %.
MIN_RISE = 0.2
# Below 2 % of the step, communication cannot be what slows a job.
MIN_COMM = 0.02
# Compute that rises by half as much or more is a job that changed altogether.
MAX_COMPUTE = 0.5


class CommSlow(ShiftDetector):
    """Judges the smallest comm of any rank, in shares of what the job computed after warm-up.

    The rank that is last waits for no one, so its comm is what communication itself costs.
    ``job.beside``: log of the samples' compute. ``job.typical_s``: the compute after warm-up.
    """

    kind = "comm_slow"
    judged = "communication, in shares of the step,"

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
        return seen.found(
            begin_step=rise.begin_step,
            value=value_s,
            baseline=baseline_s,
            summary=f"communication takes {value_s:.3g} s of a step on all ranks since step "
            f"{rise.begin_step} instead of {baseline_s:.3g} s, compute does not",
        )
