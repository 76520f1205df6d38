"""The base of detectors: records in, results out, in the records' own time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import GenericAlias
from typing import Any, Generic, Literal, Protocol, TypeVar

import msgspec

from warpwatch_detection.budget import FALSE_ALARMS_PER_JOB_DAY, rate_per_s
from warpwatch_telemetry.anomalies import Detected, Severity
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import RankEvent, Record, WorkClass

# The first steps of a job are not evaluated: they are enough for compilation and the first
# allocations of a plain loop, and for loaders to fill.
WARMUP_STEPS = 20
# The deadline of a detector to which silence means nothing.
NEVER = float("inf")
# Far above every count and duration in an event, and far below where float arithmetic ends.
MAX_NUMBER = 1e30


class JobStep(msgspec.Struct, frozen=True):
    """One step of all ranks of a job that this process follows. Seconds; ``index`` counts from 0.

    Steps that a capture touched are left out, declared pauses (checkpoint, eval) are subtracted.
    compute_s: per rank, duration less comm, data_wait and pauses: the rank's own work.
    data_wait_s, comm_s: per rank, waiting for input and for other ranks.
    duration_s: median over the ranks.
    common_s: median compute + smallest comm: the step as it would be without one rank's delay.
    tokens, samples: per rank, the work of the step; a rank that does not count it is absent, and
    a rank that counts tokens has no samples. work: the median rank's, 0 if unknown.
    stages: where parallelism is known, per rank the number of the group that does the same work.
    alike: whether the ranks of a group do equal work; None if the program does not report it.
    """

    time: float
    job_id: JobId
    step: int
    index: int
    duration_s: float
    common_s: float
    compute_s: Mapping[int, float]
    data_wait_s: Mapping[int, float]
    comm_s: Mapping[int, float] = {}
    tokens: Mapping[int, int] = {}
    samples: Mapping[int, int] = {}
    work: float = 0.0
    stages: Mapping[int, int] = {}
    alike: bool | None = None

    def found(self, severity: Severity = "warning", **more: Any) -> Detected:
        """Return a finding about the job at this step; ``more``: fields that the step lacks."""
        fields = self.job_id.fields()
        return Detected(time=self.time, severity=severity, step=self.step, **fields, **more)


class JobIteration(JobStep, frozen=True):
    """One iteration of all ranks of a server, with its work as in ``Step``; else as a JobStep.

    Trainings' detectors do not read it: an iteration lasts as long as its work takes.
    count: above 1, it is the mean of so many: of a second of which only a summary is known.
    """

    work_class: WorkClass = ""
    prefill_tokens: int = 0
    decode_requests: int = 0
    kv_tokens: int = 0
    count: int = 1


Observation = Record | JobStep


@dataclass(frozen=True, slots=True)
class Cleared:
    """The end of a fault of a job or device.

    for_good: the next finding is another anomaly, however soon it comes.
    """

    time: float
    job_id: JobId | None = None
    device: str | None = None
    for_good: bool = False


# A detector repeats Detected while a fault lasts. No result means nothing new or too little data.
DetectorResult = Detected | Cleared
Results = Iterable[DetectorResult]


@dataclass(frozen=True, slots=True)
class DetectorStatus:
    """A detector's present result for one job, rank or device, and how near it is to its limit.

    answer: learning (not enough data yet), fine or found.
    value, baseline, limit: the quantity, what it is compared with, and where a fault starts.
    nearest, nearest_step: the largest share of the limit that was reached (1: the limit), and when.
    sees, effect: the least effect that would be found now, and the one that should be, as shares
    of the usual; blind: the first is larger, or there is nothing to compare with.
    text: one line: the quantity with its limit, how near it came, and the least effect.
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
    owner: str = ""
    run: str = ""
    sees: float | None = None
    effect: float | None = None
    blind: bool = False

    def __post_init__(self) -> None:
        sees, effect = self.sees, self.effect
        if sees is not None and effect is not None:
            object.__setattr__(self, "blind", sees > effect)
        object.__setattr__(self, "text", "; ".join(self._parts()))

    def _parts(self) -> Iterator[str]:
        yield self.text
        if self.nearest is not None:
            at = f" at step {self.nearest_step}" if self.nearest_step is not None else ""
            yield f"came to {self.nearest:.2f} of its limit{at}"
        if self.sees is not None and self.effect is not None:
            eyes = f"blind to {self.effect:.0%}, it sees" if self.blind else "sees"
            yield f"{eyes} {self.sees:.0%} and more"

    @property
    def job_id(self) -> JobId | None:
        return None if self.job is None else JobId(self.owner, self.job, self.run)


class Detector(ABC):
    """A detector of one kind of anomaly.

    ``state`` is everything that it remembers: a dataclass of numbers, texts, None, lists, tuples,
    dicts, sets and such dataclasses, fully annotated, so that it outlives a restart of the daemon.
    ``state_version`` grows when the state's form or meaning changes, so that an older one is not
    read. ``waits``: silence can be a fault, and the state has a ``deadline`` for ``expire``.
    ``reads``: the only types of observations that it gets.
    """

    kind: str
    state: Any
    state_version = 1
    waits = False
    reads: tuple[type, ...]

    @property
    def state_form(self) -> Any:
        """The type of the state with the types of all that it contains."""
        return type(self.state)

    @abstractmethod
    def observe(self, seen: Any) -> Results: ...

    def expire(self, now: float) -> Results:
        """Return what the silence until the deadline, ``now``, means; set a later deadline."""
        return ()

    def forget(self, job: JobId) -> None:  # noqa: B027
        """Drop the state of a job that has ended."""

    def resolve(self, device: str, now: float) -> Cleared | None:
        """Close the fault of a device for an operator; return None if it closes by itself."""
        return None

    @abstractmethod
    def statuses(self) -> Iterable[DetectorStatus]:
        """Return a status for every job, rank or device that is evaluated."""


class DetectorJobState(Protocol):
    """A detector's memory of one job. index: of its newest step. on: truthy while a fault lasts."""

    index: int

    @property
    def on(self) -> object: ...


S = TypeVar("S")
J = TypeVar("J", bound=DetectorJobState)


@dataclass(slots=True)
class JobStates(Generic[S]):
    """The state of a detector that remembers jobs."""

    jobs: dict[JobId, S] = field(default_factory=dict)


class JobDetector(Detector, Generic[J]):
    """A detector that evaluates the steps of each job in ``judge``.

    A healthy job varies too, so limits follow from ``false_alarms_per_job_day``.
    job_type: the type of its state of one job.
    """

    reads: tuple[type, ...] = (JobStep,)
    job_type: type[J]

    def __init__(self, false_alarms_per_job_day: float = FALSE_ALARMS_PER_JOB_DAY) -> None:
        self._rate_per_s = rate_per_s(self.kind, false_alarms_per_job_day)
        self.state: JobStates[J] = JobStates()

    @property
    def state_form(self) -> Any:
        return GenericAlias(JobStates, (self.job_type,))

    @abstractmethod
    def judge(self, job: J, seen: JobStep) -> Results: ...

    def observe(self, seen: Any) -> Results:
        """Evaluate a JobStep; a detector that reads more types handles the others."""
        jobs: dict[JobId, J] = self.state.jobs
        job, index = jobs.get(seen.job_id), seen.index
        if job is not None and index > job.index:
            job.index = index
            return self.judge(job, seen)
        # The job was restarted: maybe on other machines, with other work.
        restarted = jobs[seen.job_id] = self.job_type()
        restarted.index = seen.index
        results = self.judge(restarted, seen)
        return (
            (Cleared(seen.time, seen.job_id), *results) if job is not None and job.on else results
        )

    def forget(self, job: JobId) -> None:
        self.state.jobs.pop(job, None)


def detail_number(event: RankEvent, name: str) -> float | None:
    """Return a finite number of an event's detail, which a process wrote; else None."""
    value = event.detail.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= MAX_NUMBER else None
