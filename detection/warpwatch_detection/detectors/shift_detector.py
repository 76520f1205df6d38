"""What step_regression and comm_slow share: a signal, its level shifts, and how long they last."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

from warpwatch_detection.detector import (
    Cleared,
    DetectorStatus,
    JobDetector,
    JobStep,
    Results,
)
from warpwatch_detection.signals.level_shift import LevelShift, Shift
from warpwatch_detection.signals.rise import CLOSING_SAMPLES, Rise
from warpwatch_detection.signals.step_signal import StepSignal
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId

# The shortest span that is judged: less is a hiccup of the machine.
LEAST_WINDOW_S = 1.0
# A level that lasted so long is the new normal: as long as an operator may take to look.
ACCEPT_AFTER_S = 600.0
# Whoever does not see a tenth is blind.
EFFECT = 0.10
# An open anomaly is found again, with its newest numbers, after so many samples.
UPDATE_SAMPLES = 20


@dataclass(slots=True)
class ShiftJob:
    """index: of the newest step; beside: what the kind keeps in step with ``shifts.samples``.

    typical_s: the unit of the signal, where it has one. rise: the one that lasts; last_rise: the
    newest that was found. nearest: the largest part of a limit that the job ever reached;
    nearest_step: where.
    """

    index: int = -1
    signal: StepSignal = field(default_factory=StepSignal)
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
    """A detector says ``judged``, ``sample``, ``confirms`` and ``found``; the rest is here."""

    judged: str

    job_type = ShiftJob

    @abstractmethod
    def sample(self, job: ShiftJob, seen: JobStep) -> float | None:
        """The sample of the signal that the step completes."""

    def confirms(self, job: ShiftJob, shift: Shift) -> bool:
        """Whether a rise is of this kind."""
        return True

    @abstractmethod
    def found(self, job: ShiftJob, rise: Rise, level: float, seen: JobStep) -> Detected:
        """What to say of a rise; ``level`` is the signal's present one."""

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
        if job.shifts.nearest > job.nearest:
            job.nearest, job.nearest_step = job.shifts.nearest, seen.step
        verdicts: Results = ()
        if shift is not None and shift.difference > 0 and self.confirms(job, shift):
            verdicts = self._begin(job, shift, seen)
        elif job.rise is not None:
            verdicts = self._go_on(job, job.rise, seen)
        del job.beside[: -len(job.shifts.samples.values)]
        return verdicts

    def _begin(self, job: ShiftJob, shift: Shift, seen: JobStep) -> Results:
        steps = (shift.window - 1) * job.signal.group
        begin_step = max(0, job.signal.first_step - steps)
        last, lasts = job.last_rise, job.rise is not None
        rise = Rise(seen.time, begin_step, shift.before, shift.difference)
        job.rise = job.last_rise = rise
        found = self.found(job, rise, shift.before + shift.difference, seen)
        # From where the last rise has led to: a second one, not the first again.
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
