"""What a detector is: records in, verdicts out, no clock but the records' own time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeGuard, TypeVar, runtime_checkable

import msgspec

from warpwatch_telemetry.anomalies import Severity
from warpwatch_telemetry.records import Record

# The deadline of a detector that waits for nothing.
NEVER = float("inf")


class JobStep(msgspec.Struct, frozen=True):
    """One step of all ranks of a job that this daemon sees. Seconds; ``index`` counts from 0.

    Steps that a capture touched are left out, declared pauses (checkpoint, eval) are taken off.
    compute_s: per rank, duration less comm, data_wait and pauses: what the rank itself works.
    data_wait_s, comm_s: per rank, waiting for input and for other ranks.
    duration_s: median over the ranks.
    common_s: median compute + smallest comm: the step as it would be without one rank's delay.
    tokens, samples: per rank, the work of the step; a rank that does not count it is absent, and
    of one that counts tokens the samples are not asked for.
    """

    time: float
    job: str
    step: int
    index: int
    duration_s: float
    common_s: float
    compute_s: Mapping[int, float]
    data_wait_s: Mapping[int, float]
    comm_s: Mapping[int, float] = {}
    tokens: Mapping[int, int] = {}
    samples: Mapping[int, int] = {}


Observation = Record | JobStep


@dataclass(frozen=True, slots=True)
class Found:
    """Something is wrong. Repeated while it lasts; fields mean what they mean in an Anomaly.

    anew: this is another anomaly than the one before, however recent that is.
    """

    time: float
    severity: Severity
    summary: str
    job: str | None = None
    rank: int | None = None
    device: str | None = None
    step: int | None = None
    begin_step: int | None = None
    value: float | None = None
    baseline: float | None = None
    separate: bool = False


@dataclass(frozen=True, slots=True)
class Fine:
    """What was found about the job or device is over."""

    time: float
    job: str | None = None
    device: str | None = None


# No verdict means: nothing new, or not enough data.
Verdict = Found | Fine


@dataclass(frozen=True, slots=True)
class DetectorStatus:
    """How a detector sees one job, rank or device now: why it would fire, or why not.

    answer: learning (not enough data yet), fine or found.
    value, baseline, limit: the quantity judged, what it is compared with, and where it is found.
    nearest: the largest value/limit excess so far, 1 at the limit, and the step (if any) it was at.
    text: one sentence with numbers.
    """

    answer: Literal["learning", "fine", "found"]
    text: str
    job: str | None = None
    rank: int | None = None
    device: str | None = None
    value: float | None = None
    baseline: float | None = None
    limit: float | None = None
    nearest: float | None = None
    nearest_step: int | None = None


class Detector(Protocol):
    """One kind of anomaly.

    ``state`` is everything that it remembers: a dataclass of numbers, texts, None, lists, tuples,
    dicts, sets and such dataclasses, fully annotated, so that it outlives a restart of the daemon.
    """

    kind: str
    state: Any

    @property
    def reads(self) -> tuple[type, ...]:
        """The only types that it is shown."""

    def observe(self, seen: Observation) -> Iterable[Verdict]: ...

    def expire(self, now: float) -> Iterable[Verdict]:
        """Called with ``now`` equal to the deadline; a later one must follow."""

    def forget(self, job: str) -> None:
        """The job is over: its memory can go."""

    def statuses(self) -> Iterable[DetectorStatus]:
        """One for every job, rank or device that is judged."""


@runtime_checkable
class HasDeadline(Protocol):
    """``deadline``: the earliest time at which ``expire`` may have something to say, or NEVER."""

    deadline: float


class Waiting(Detector, Protocol):
    """A detector to which silence can say something; ``expire`` of no other is ever called."""

    state: HasDeadline


def is_waiting(detector: Detector) -> TypeGuard[Waiting]:
    return isinstance(detector.state, HasDeadline)


class Timeless:
    """For a detector that decides on what it sees and never on silence."""

    def expire(self, now: float) -> Iterable[Verdict]:
        return ()


class JobState(Protocol):
    """What a detector remembers of one job. index: of its newest step; on: something is found."""

    index: int

    @property
    def on(self) -> object: ...


J = TypeVar("J", bound=JobState)


class HasJobs(Protocol[J]):
    jobs: dict[str, J]


class PerJob(Timeless, ABC, Generic[J]):
    """For a detector that looks at steps of jobs: it says what it remembers, and judges a step."""

    state: HasJobs[J]
    reads: tuple[type, ...] = (JobStep,)

    @abstractmethod
    def begin(self) -> J:
        """The memory of a job of which nothing was seen."""

    @abstractmethod
    def judge(self, job: J, seen: JobStep) -> Iterable[Verdict]: ...

    def observe(self, seen: Any) -> Iterable[Verdict]:
        """Of a JobStep; whoever reads more tells them apart."""
        jobs = self.state.jobs
        job, index = jobs.get(seen.job), seen.index
        if job is not None and index > job.index:
            job.index = index
            return self.judge(job, seen)
        # A job that began anew: other machines, other work.
        anew = jobs[seen.job] = self.begin()
        anew.index = seen.index
        verdicts = self.judge(anew, seen)
        return (Fine(seen.time, seen.job), *verdicts) if job is not None and job.on else verdicts

    def forget(self, job: str) -> None:
        self.state.jobs.pop(job, None)
