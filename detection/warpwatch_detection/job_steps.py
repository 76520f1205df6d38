"""Joins the steps that single ranks report into steps of the job.

A step is complete when every live rank has reported it. Records of ranks arrive in batches, so
a few steps wait for the slower reader; the wait is bounded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from warpwatch_detection.capture_windows import CaptureWindows
from warpwatch_detection.detector import JobStep
from warpwatch_detection.signals.peers import stages
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent, RankSeen, Record, Step

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
    left_at: the newest joined step when a rank left; its successor may count from 0.
    """

    newest: dict[int, int] = field(default_factory=dict)
    pending: dict[int, dict[int, Step]] = field(default_factory=dict)
    index: int = 0
    emitted: int = -1
    masked_until: int = -1
    left_at: int = -1

    def is_restart(self, record: Step) -> bool:
        """Whether the step is the first of a program that was started again."""
        number, newest = record.step, self.newest.get(record.rank, self.left_at)
        return number <= newest and (number == 0 or number <= newest - RESTART_STEPS)

    def take(self, record: Step) -> dict[int, Step] | None:
        """A new step of a rank. The step of all ranks that it ends, or that has waited too long."""
        number = record.step
        ranks = self.pending.get(number)
        if ranks is None:
            ranks = self.pending[number] = {}
        ranks[record.rank] = record
        if len(ranks) >= len(self.newest):
            del self.pending[number]
            if self.pending:
                # Older steps that still wait have lost a record.
                self.pending = {n: steps for n, steps in self.pending.items() if n > number}
        elif len(self.pending) > MAX_PENDING:
            number = min(self.pending)
            ranks = self.pending.pop(number)
        else:
            return None
        self.emitted = number
        return ranks


@dataclass(slots=True)
class JobStepsState:
    """places: by job and rank where it stands in each kind of parallelism, where that is known."""

    jobs: dict[JobId, JoinedJob] = field(default_factory=dict)
    places: dict[JobId, dict[int, dict[str, tuple[int, int]]]] = field(default_factory=dict)
    captures: CaptureWindows = field(default_factory=CaptureWindows)


class JobSteps:
    """Records in, finished steps of whole jobs out. Memory: MAX_PENDING steps a rank."""

    def __init__(self) -> None:
        self.state = JobStepsState()
        # By job, as far as asked for since the last rank came.
        self._stages: dict[JobId, tuple[dict[int, int], bool | None]] = {}

    def observe(self, record: Record) -> JobStep | None:
        """The step of the job that the record ends."""
        if type(record) is Step:
            return self._step(record)
        if isinstance(record, RankEvent):
            self._event(record)
        elif isinstance(record, RankSeen):
            if record.parallel or record.job_id in self.state.places:
                places = self.state.places.setdefault(record.job_id, {})
                places[record.rank] = _place(record)
                self._stages.pop(record.job_id, None)
        elif isinstance(record, End) and record.rank is not None:
            self._gone(record.job_id, record.rank)
        return None

    def forget(self, job: JobId) -> None:
        self.state.jobs.pop(job, None)
        self.state.places.pop(job, None)
        self._stages.pop(job, None)
        self.state.captures.forget(job)

    def _event(self, record: RankEvent) -> None:
        job = self.state.jobs.get(record.job_id)
        if self.state.captures.observe(record) and job is not None:
            job.masked_until = max(job.newest.values(), default=-1) + STEPS_AFTER_CAPTURE
        if record.event == "died":
            self._gone(record.job_id, record.rank)

    def _gone(self, name: JobId, rank: int) -> None:
        job = self.state.jobs.get(name)
        if job is not None and job.newest.pop(rank, None) is not None:
            job.left_at = job.emitted

    def _step(self, record: Step) -> JobStep | None:
        """Of one that lasted finitely long."""
        job, rank, number = self.state.jobs.get(record.job_id), record.rank, record.step
        if job is None or job.is_restart(record):
            job = self.state.jobs[record.job_id] = JoinedJob()
        if number <= job.newest.get(rank, -1):
            return None
        job.newest[rank] = number
        ranks = job.take(record) if number > job.emitted else None
        if ranks is None:
            return None
        joined = join(ranks, job.index, *self._stages_of(record.job_id))
        if joined is None:
            job.masked_until = max(job.masked_until, job.emitted + STEPS_AFTER_CAPTURE)
        if job.emitted <= job.masked_until or self._is_captured(ranks):
            return None
        job.index += 1
        return joined

    def _stages_of(self, name: JobId) -> tuple[dict[int, int], bool | None]:
        known = self._stages.get(name)
        if known is None:
            known = self._stages[name] = stages(self.state.places.get(name, {}))
        return known

    def _is_captured(self, ranks: dict[int, Step]) -> bool:
        some = next(iter(ranks.values()))
        return self.state.captures.runs_until(some.job_id, some.time) is not None


def _place(record: RankSeen) -> dict[str, tuple[int, int]]:
    """Return where the rank stands; nothing if copies of the model are all that is known of it.

    Fewer copies than ranks: the program splits the model in a way that it does not report.
    """
    place = dict(record.parallel)
    _, copies = place.get("data", (0, 0))
    return {} if place.keys() == {"data"} and copies < record.world_size else place


def join(
    ranks: dict[int, Step], index: int, stages: dict[int, int], alike: bool | None
) -> JobStep | None:
    """One step of several ranks; every rank's phases are disjoint parts of its duration.

    None where one of them was profiled.
    """
    compute_s: dict[int, float] = {}
    data_wait_s: dict[int, float] = {}
    comm_s: dict[int, float] = {}
    tokens: dict[int, int] = {}
    samples: dict[int, int] = {}
    durations: list[float] = []
    for rank, step in ranks.items():
        if step.profiled:
            return None
        phases = step.phases_s
        pauses_s = phases.get("checkpoint", 0.0) + phases.get("eval", 0.0)
        duration_s = step.duration_s - pauses_s
        comm_s[rank] = comm = phases.get("comm", 0.0)
        data_wait_s[rank] = wait = phases.get("data_wait", 0.0)
        own_s = duration_s - comm - wait
        compute_s[rank] = own_s if own_s > 0.0 else 0.0
        durations.append(duration_s)
        if step.tokens:
            tokens[rank] = step.tokens
        elif step.samples:
            samples[rank] = step.samples
    return JobStep(
        time=max([step.time for step in ranks.values()]),
        job_id=step.job_id,
        step=step.step,
        index=index,
        duration_s=_middle(durations),
        common_s=_middle(compute_s.values()) + min(comm_s.values()),
        compute_s=compute_s,
        data_wait_s=data_wait_s,
        comm_s=comm_s,
        tokens=tokens,
        samples=samples,
        work=float(_middle((tokens or samples or {0: 0}).values())),
        stages=stages,
        alike=alike,
    )


def _middle(values: Collection[float]) -> float:
    """One that there is, the lower of two: time and work of a step are of the same rank."""
    return sorted(values)[(len(values) - 1) // 2]
