"""What step_regression and comm_slow share: a signal, its level shifts, and how long they last."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from warpwatch_detection.config_steps import ShiftConfig
from warpwatch_detection.detector import DetectorStatus, Fine, JobDetector, JobStep, Verdict
from warpwatch_detection.signals.level_shift import LevelShift, Shift
from warpwatch_detection.signals.rise import CLOSING_SAMPLES, Rise
from warpwatch_detection.signals.step_signal import StepSignal
from warpwatch_telemetry.anomalies import Found

C = TypeVar("C", bound=ShiftConfig)

# An open anomaly is told again after so many samples.
UPDATE_SAMPLES = 20


@dataclass(slots=True)
class ShiftJob:
    """index: of the newest step; beside: what the kind keeps in step with ``shifts.samples``.

    open_rise: the rise that lasts; told: the last one that was told.
    nearest: the largest part of a limit that the job ever reached; nearest_step: where.
    """

    index: int = -1
    signal: StepSignal = field(default_factory=StepSignal)
    shifts: LevelShift = field(default_factory=LevelShift)
    beside: list[float] = field(default_factory=list)
    typical: float = 0.0
    open_rise: Rise | None = None
    told: Rise | None = None
    nearest: float = 0.0
    nearest_step: int | None = None

    @property
    def on(self) -> bool:
        return self.open_rise is not None


@dataclass(slots=True)
class ShiftState:
    jobs: dict[str, ShiftJob] = field(default_factory=dict)


class ShiftDetector(JobDetector[ShiftJob], Generic[C]):
    """A detector says ``sample``, ``confirms`` and ``found``; the rest is here."""

    kind: str

    def __init__(self, config: C) -> None:
        self._config = config
        self.state = ShiftState()

    def begin(self) -> ShiftJob:
        return ShiftJob()

    @abstractmethod
    def sample(self, job: ShiftJob, seen: JobStep) -> bool:
        """Whether the step completes a sample of the signal, which ``job.shifts`` then has."""

    @abstractmethod
    def confirms(self, job: ShiftJob, shift: Shift) -> bool:
        """Whether a rise is of this kind."""

    @abstractmethod
    def found(self, job: ShiftJob, rise: Rise, level: float, seen: JobStep) -> Found:
        """What to say of a rise; ``level`` is the signal's present one."""

    def judge(self, job: ShiftJob, seen: JobStep) -> Iterable[Verdict]:
        return self._judge_sample(job, seen) if self.sample(job, seen) else ()

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            yield self._status(name, job)

    def _judge_sample(self, job: ShiftJob, seen: JobStep) -> Iterable[Verdict]:
        if not job.shifts.least_window:
            job.shifts.least_window = job.signal.window_of(self._config.block_s)
        shift = job.shifts.judge(self._config)
        if job.shifts.nearest > job.nearest:
            job.nearest, job.nearest_step = job.shifts.nearest, seen.step
        verdicts: Iterable[Verdict] = ()
        if shift is not None and shift.difference > 0 and self.confirms(job, shift):
            verdicts = self._begin(job, shift, seen)
        elif job.open_rise is not None:
            verdicts = self._go_on(job, job.open_rise, seen)
        kept = len(job.shifts.samples.values)
        if len(job.beside) > kept:
            del job.beside[:-kept]
        return verdicts

    def _begin(self, job: ShiftJob, shift: Shift, seen: JobStep) -> Iterable[Verdict]:
        steps = (shift.window - 1) * job.signal.group
        begin_step = max(0, job.signal.first_step - steps)
        last, lasts = job.told, job.open_rise is not None
        rise = Rise(seen.time, begin_step, shift.before, shift.difference)
        job.open_rise = job.told = rise
        found = self.found(job, rise, shift.before + shift.difference, seen)
        if last is not None and shift.before >= last.baseline + last.rise / 2:
            # From where the last rise has led to: a second one, not the first again.
            return (Fine(seen.time, seen.job, for_good=True), found)
        return (Fine(seen.time, seen.job), found) if lasts else (found,)

    def _go_on(self, job: ShiftJob, rise: Rise, seen: JobStep) -> Iterable[Verdict]:
        config = self._config
        rise.samples += 1
        if rise.samples % UPDATE_SAMPLES:
            return ()
        level = job.shifts.recent(CLOSING_SAMPLES)
        accepted = rise.accepted(seen.time, config.accept_after_s, config.accept_samples)
        if accepted or rise.over(level):
            job.open_rise = None
            return (Fine(seen.time, seen.job),)
        return (self.found(job, rise, level, seen),)

    def _status(self, name: str, job: ShiftJob) -> DetectorStatus:
        shifts = job.shifts
        if not shifts.ready:
            text = f"{len(shifts.samples.values)} samples seen, its noise is not known yet"
            return DetectorStatus("learning", text, job=name)
        limit = shifts.limit(self._config)
        text = (
            f"level {100 * shifts.difference:+.1f} % against the steps before, "
            f"limit {100 * limit:.1f} %"
        )
        return DetectorStatus(
            answer="found" if job.open_rise else "fine",
            text=text,
            job=name,
            value=shifts.difference,
            baseline=0.0,
            limit=limit,
            nearest=job.nearest,
            nearest_step=job.nearest_step,
        )
