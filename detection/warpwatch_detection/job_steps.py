"""Joins the steps that single ranks report into steps of the job.

A step is complete when every live rank has reported it. Records of ranks arrive in batches, so
a few steps wait for the slower reader; the wait is bounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from warpwatch_detection.capture_windows import CaptureWindows
from warpwatch_detection.detector import JobStep
from warpwatch_telemetry.captures import CAPTURE_TIMEOUT_S
from warpwatch_telemetry.records import End, RankEvent, Record, Step

# Steps that may wait for a rank; after that they are judged without it.
MAX_PENDING = 64
# Export and tracing that is not torn down at once still cost the steps that follow a capture.
STEPS_AFTER_CAPTURE = 20
# A step number this far back is a restart, not a late or repeated record.
RESTART_STEPS = MAX_PENDING


@dataclass(slots=True)
class JoinedJob:
    """newest: per live rank, its newest step; pending: steps that wait for a rank, by number.

    index: of the next joined step; emitted: the newest; masked_until: after a capture.
    left_at: the newest joined step when a rank left; its successor may begin anew.
    """

    newest: dict[int, int] = field(default_factory=dict)
    pending: dict[int, dict[int, Step]] = field(default_factory=dict)
    index: int = 0
    emitted: int = -1
    masked_until: int = -1
    left_at: int = -1

    def is_restart(self, rank: int, number: int) -> bool:
        """Whether a step that is no news is the first of a program that runs anew."""
        newest = self.newest.get(rank, self.left_at)
        return number <= newest and (number == 0 or number <= newest - RESTART_STEPS)


@dataclass(slots=True)
class JobStepsState:
    """``capturing``: of CaptureWindows."""

    jobs: dict[str, JoinedJob] = field(default_factory=dict)
    capturing: dict[str, dict[int, float]] = field(default_factory=dict)


class JobSteps:
    """Records in, finished steps of whole jobs out. Memory: MAX_PENDING steps a rank."""

    def __init__(self) -> None:
        self.state = JobStepsState()

    @property
    def state(self) -> JobStepsState:
        return self._state

    @state.setter
    def state(self, state: JobStepsState) -> None:
        self._state = state
        self._jobs = state.jobs
        self._captures = CaptureWindows(CAPTURE_TIMEOUT_S, state.capturing)

    def observe(self, record: Record) -> Sequence[JobStep]:
        if type(record) is Step:
            joined = self.step(record)
            return () if joined is None else (joined,)
        if isinstance(record, RankEvent):
            self._event(record)
        elif isinstance(record, End) and record.rank is not None:
            self._gone(record.job, record.rank)
        return ()

    def forget(self, job: str) -> None:
        self._jobs.pop(job, None)
        self._captures.forget(job)

    def _event(self, record: RankEvent) -> None:
        job = self._jobs.get(record.job)
        if self._captures.observe(record) and job is not None:
            job.masked_until = max(job.newest.values(), default=-1) + STEPS_AFTER_CAPTURE
        if record.event == "died":
            self._gone(record.job, record.rank)

    def _gone(self, name: str, rank: int) -> None:
        job = self._jobs.get(name)
        if job is not None and job.newest.pop(rank, None) is not None:
            job.left_at = job.emitted

    def step(self, record: Step) -> JobStep | None:
        """One step of one rank, which lasted finitely long; the step of the job that it ends."""
        number, rank = record.step, record.rank
        try:
            job = self._jobs[record.job]
            newest = job.newest
            is_new = number > newest[rank]
        except KeyError:
            is_new = False
        if not is_new:
            begun = self._begin(record)
            if begun is None:
                return None
            job, newest = begun, begun.newest
        newest[rank] = number
        if number <= job.emitted:
            return None
        ranks = job.pending.get(number)
        if ranks is None:
            return self._wait(job, record)
        ranks[rank] = record
        return self._complete(job, number) if len(ranks) >= len(newest) else None

    def _begin(self, record: Step) -> JoinedJob | None:
        """The job that a step begins, or its rank joins; None where it is no news."""
        job, number, rank = self._jobs.get(record.job), record.step, record.rank
        if job is None or (
            number <= job.newest.get(rank, job.left_at) and job.is_restart(rank, number)
        ):
            job = self._jobs[record.job] = JoinedJob()
        return job if rank not in job.newest or number > job.newest[rank] else None

    def _wait(self, job: JoinedJob, record: Step) -> JobStep | None:
        """The first record of a step."""
        job.pending[record.step] = {record.rank: record}
        if len(job.newest) <= 1:
            return self._complete(job, record.step)
        if len(job.pending) > MAX_PENDING:
            oldest = min(job.pending)
            return self._emit(job, oldest, job.pending.pop(oldest))
        return None

    def _complete(self, job: JoinedJob, number: int) -> JobStep | None:
        """Emits the step; older ones still waiting lost a record and are dropped."""
        ranks = job.pending.pop(number)
        if job.pending:
            job.pending = {later: steps for later, steps in job.pending.items() if later > number}
        return self._emit(job, number, ranks)

    def _emit(self, job: JoinedJob, number: int, ranks: dict[int, Step]) -> JobStep | None:
        job.emitted = number
        some = next(iter(ranks.values()))
        joined = join(ranks, job.index)
        if joined is None:
            job.masked_until = max(job.masked_until, number + STEPS_AFTER_CAPTURE)
        if number <= job.masked_until or self._captures.runs_until(some.job, some.time) is not None:
            return None
        job.index += 1
        return joined


def join(ranks: dict[int, Step], index: int) -> JobStep | None:
    """One step of several ranks; every rank's phases are disjoint parts of its duration.

    None where one of them was profiled.
    """
    compute_s: dict[int, float] = {}
    data_wait_s: dict[int, float] = {}
    comm_s: dict[int, float] = {}
    tokens: dict[int, int] = {}
    samples: dict[int, int] = {}
    durations: list[float] = []
    time = 0.0
    for rank, step in ranks.items():
        if step.profiled:
            return None
        duration, comm, wait = step.duration_s, 0.0, 0.0
        if phases := step.phases_s:
            try:
                comm, wait, others = phases["comm"], phases["data_wait"], len(phases) - 2
            except KeyError:
                comm, wait, others = phases.get("comm", 0.0), phases.get("data_wait", 0.0), 1
            if others and ("checkpoint" in phases or "eval" in phases):
                duration -= phases.get("checkpoint", 0.0) + phases.get("eval", 0.0)
        own = duration - comm - wait
        compute_s[rank] = own if own > 0.0 else 0.0
        data_wait_s[rank] = wait
        comm_s[rank] = comm
        durations.append(duration)
        if step.tokens:
            tokens[rank] = step.tokens
        elif step.samples:
            samples[rank] = step.samples
        if step.time > time:
            time = step.time
    middle = (len(durations) - 1) // 2
    return JobStep(
        time=time,
        job=step.job,
        step=step.step,
        index=index,
        duration_s=sorted(durations)[middle],
        common_s=sorted(compute_s.values())[middle] + min(comm_s.values()),
        compute_s=compute_s,
        data_wait_s=data_wait_s,
        comm_s=comm_s,
        tokens=tokens,
        samples=samples,
    )
