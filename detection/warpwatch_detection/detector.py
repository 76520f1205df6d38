"""The base of detectors: records in, results out, in the records' own time.

It also has the budget of false alarms that they share, and the runner of all detectors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from types import GenericAlias
from typing import Any, Generic, Literal, TypeVar

import msgspec

from warpwatch_telemetry.anomalies import Detected, Severity
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import RankEvent, Record, Serve, WorkClass

# The first steps of a job are not evaluated: they are enough for compilation and the first
# allocations of a plain loop, and for loaders to fill.
WARMUP_STEPS = 20
# The deadline of a detector to which silence means nothing.
NEVER = float("inf")
# Far above every count and duration in an event, and far below where float arithmetic ends.
MAX_NUMBER = 1e30


class JobStep(msgspec.Struct, frozen=True):
    """One step of all ranks of a job that this process follows, in seconds.

    Steps that a capture touched are left out, declared pauses (checkpoint, eval) are subtracted.

    index: the number of joined steps before it. duration_s: the median over the ranks.
    compute_s: by rank, duration less comm, data_wait and pauses: the rank's own work.
    data_wait_s, comm_s: by rank, the wait for input and for other ranks.
    common_s: median compute plus smallest comm: the step as it would be without one rank's delay.
    tokens, samples: by rank, the work of the step. A rank that does not count it is absent, and
    a rank that counts tokens has no samples. work: the median rank's work, 0 if unknown.
    stages: by rank, the group that does the same work, if parallelism is known.
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

    def found(self, summary: str, value: float, baseline: float | None, **more: Any) -> Detected:
        """Return a finding about the job at this step; ``more``: the other fields."""
        more["step"] = self.step
        return job_found(self.job_id, self.time, summary, value, baseline, **more)

    def cleared(self, for_good: bool = False) -> Cleared:
        return Cleared(self.time, self.job_id, for_good=for_good)


class JobIteration(JobStep, frozen=True):
    """One iteration of all ranks of a server, with its work as in ``Step``.

    Detectors of trainings do not read it: an iteration lasts as long as its work takes.
    count: the iterations of which this is the mean; above 1 if only a second's summary is known.
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

    for_good: whether the next finding is another anomaly, however soon it comes.
    """

    time: float
    job_id: JobId | None = None
    device: str | None = None
    for_good: bool = False


# A detector repeats Detected while a fault lasts. No result means nothing new or too little data.
DetectorResult = Detected | Cleared
Results = Iterable[DetectorResult]


def job_found(
    job: JobId, time: float, summary: str, value: float | None = None,
    baseline: float | None = None, *, severity: Severity = "warning", rank: int | None = None,
    step: int | None = None, begin_step: int | None = None,
) -> Detected:  # fmt: skip
    """Return a finding about a job, or about one rank of it."""
    at: dict[str, Any] = {"rank": rank, "step": step, "begin_step": begin_step, **job.fields()}
    return Detected(time, severity, summary, value=value, baseline=baseline, **at)


def changed(
    job: JobId, time: float, was_found: object, found: Detected | None
) -> tuple[DetectorResult, ...]:
    """Return the finding, or that it is over, or nothing."""
    if found is not None:
        return (found,)
    return (Cleared(time, job),) if was_found else ()


Answer = Literal["learning", "fine", "found"]


@dataclass(frozen=True, slots=True)
class DetectorStatus:
    """A detector's present result for one job, rank or device, and how near it is to its limit.

    answer: "learning" means that there is not enough data yet.
    text: one line with the quantity, its limit, how near it came, and the least effect.
    value, baseline, limit: the quantity, its comparison value, and the value at which a fault
    starts. nearest, nearest_step: the largest part of the limit that was reached, and its step.
    sees, effect: the least effect that would be found now, and the one that should be, as shares
    of the usual. blind: whether ``sees`` is larger, or there is nothing to compare with.
    """

    answer: Answer
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
        tail = "".join(f"; {part}" for part in self._parts())
        # If another process has sent it, it has its tail already.
        object.__setattr__(self, "text", self.text.removesuffix(tail) + tail)

    def _parts(self) -> Iterator[str]:
        if self.nearest is not None:
            at = f" at step {self.nearest_step}" if self.nearest_step is not None else ""
            yield f"came to {self.nearest:.2f} of its limit{at}"
        if self.sees is not None and self.effect is not None:
            eyes = f"blind to {self.effect:.0%}, it sees" if self.blind else "sees"
            yield f"{eyes} {self.sees:.0%} and more"

    @property
    def job_id(self) -> JobId | None:
        return None if self.job is None else JobId(self.owner, self.job, self.run)


@dataclass(slots=True)
class Nearest:
    """The base of states that know the largest part of their limit so far, and its step."""

    nearest: float = 0.0
    nearest_step: int | None = None

    def reach(self, excess: float, step: int) -> None:
        if excess > self.nearest:
            self.nearest, self.nearest_step = excess, step


def job_status(
    job: JobId, is_found: object, text: str, value: float | None = None,
    limit: float | None = None, near: Nearest | None = None, learns: object = False, **more: Any,
) -> DetectorStatus:  # fmt: skip
    """Return the status of a job or rank.

    learns: whether there is not enough data yet, unless it is found. more: the other fields.
    """
    if near is not None:
        more |= {"nearest": near.nearest, "nearest_step": near.nearest_step}
    answer: Answer = "found" if is_found else "learning" if learns else "fine"
    return DetectorStatus(answer, text, value=value, limit=limit, **job.fields(), **more)


def number(value: object) -> float | None:
    """Return a finite number that a process reported, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if abs(value) <= MAX_NUMBER else None


def detail_number(event: RankEvent, name: str) -> float | None:
    """Return a finite number of an event's detail, else None."""
    return number(event.detail.get(name))


def rank_names(ranks: Iterable[int]) -> str:
    """Return ``rank 3``, or ``ranks 1, 2`` with the first eight of several ranks."""
    first, *others = map(str, sorted(ranks)[:8])
    return f"ranks {', '.join((first, *others))}" if others else f"rank {first}"


class Detector(ABC):
    """A detector of one kind of anomaly.

    ``state`` is everything that it remembers: a dataclass of numbers, texts, None, lists, tuples,
    dicts, sets and such dataclasses, fully annotated, so that it outlives a restart of the daemon.
    ``state_version`` grows when the state's form or meaning changes, so that an older one is not
    read. ``waits``: whether silence can be a fault; then the state has a ``deadline`` for
    ``expire``. ``reads``: the only types of observations that it gets.
    """

    kind: str
    state: Any
    # The type of what a generic state has for each job or device.
    state_of: Any = None
    state_version = 1
    waits = False
    reads: tuple[type, ...]

    @property
    def state_form(self) -> Any:
        """The type of the state with the types of all that it contains."""
        state = type(self.state)
        return state if self.state_of is None else GenericAlias(state, (self.state_of,))

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


S = TypeVar("S")


@dataclass(slots=True)
class JobStates(Generic[S]):
    """The state of a detector that remembers jobs."""

    jobs: dict[JobId, S] = field(default_factory=dict)


class JobsDetector(Detector, Generic[S]):
    """A detector that remembers each job in a ``state_of``."""

    def __init__(self) -> None:
        self.state: JobStates[S] = JobStates()

    def forget(self, job: JobId) -> None:
        self.state.jobs.pop(job, None)


# --- the budget of false alarms ---
#
# Healthy jobs vary too, so every limit is exceeded by chance now and then. The operator configures
# how often a job may have a false alarm. This and the number of checks per day determine how far a
# limit is above the noise.

DAY_S = 86400.0
FALSE_ALARMS_PER_JOB_DAY = 0.5
# Sums to 1. The kinds that find the most faults get the most.
SHARES = {
    "step_regression": 0.35,
    "step_drift": 0.1,
    "step_spikes": 0.15,
    "comm_slow": 0.1,
    "data_stall": 0.1,
    "straggler": 0.1,
    "gc_pause": 0.1,
}
# Servers have this kind instead of the kinds about steps that servers do not have.
SHARES_OF_SERVERS = {"latency_regression": 0.3}
# A check that fails more often by chance is useless, however large the budget is.
MOST_PER_CHECK = 0.01


def rate_per_s(kind: str, per_job_day: float = FALSE_ALARMS_PER_JOB_DAY) -> float:
    """Return the false alarms of this kind that a job may have per second."""
    return per_job_day * (SHARES | SHARES_OF_SERVERS)[kind] / DAY_S


@lru_cache(maxsize=4096)
def deviations(rate_per_s: float, check_s: float, ways: int = 1) -> float:
    """Return the standard deviations that normal noise exceeds at this rate.

    check_s: seconds from one independent check to the next. ways: the number of ranks or windows
    that share the rate (Bonferroni).
    """
    chance = min(max(rate_per_s * check_s / ways, 1e-15), MOST_PER_CHECK)
    return -NormalDist().inv_cdf(chance)


# A fault that could not be evaluated for this long (no load, not read, no peers) counts as over.
STALE_S = 600.0


@dataclass(slots=True)
class Unjudged:
    """The time in which a fault could not be evaluated. ``since``: NEVER while it can be."""

    since: float = NEVER
    time: float = NEVER

    def is_stale(self, now: float) -> bool:
        """Apply a time at which it cannot be evaluated; return whether that has lasted."""
        # After a longer pause the daemon was away, not the job.
        if self.since == NEVER or now - self.time >= STALE_S:
            self.since = now
        self.time = now
        return now - self.since >= STALE_S

    def end(self) -> None:
        self.since = NEVER


class StepsDetector(JobsDetector[S]):
    """A detector that evaluates the steps of each job, at limits that follow from the budget.

    The state of a job has the ``index`` of its newest step, and ``on`` is true while a fault lasts.
    """

    reads: tuple[type, ...] = (JobStep,)

    def __init__(self, false_alarms_per_job_day: float = FALSE_ALARMS_PER_JOB_DAY) -> None:
        super().__init__()
        self._rate_per_s = rate_per_s(self.kind, false_alarms_per_job_day)

    @abstractmethod
    def evaluate(self, job: S, seen: JobStep) -> Results: ...

    def observe(self, seen: Any) -> Results:
        """Evaluate a JobStep, or a second of a server, which may be without load."""
        if isinstance(seen, Serve):
            return self.end_stale(seen)
        jobs: dict[JobId, Any] = self.state.jobs
        job, over = jobs.get(seen.job_id), False
        if job is None or seen.index <= job.index:
            # The job was restarted: maybe on other machines, with other work.
            over = job is not None and job.on
            job = jobs[seen.job_id] = self.state_of()
        job.index = seen.index
        results = self.evaluate(job, seen)
        return (seen.cleared(), *results) if over else results

    def end_stale(self, seen: JobStep | Serve) -> Results:
        """End a fault that this, and what came before it, does not let evaluate; learn anew."""
        job: Any = self.state.jobs.get(seen.job_id)
        if job is None or not job.on or not job.unjudged.is_stale(seen.time):
            return ()
        self.state.jobs[seen.job_id] = self.state_of()
        return (Cleared(seen.time, seen.job_id),)


# --- all detectors ---

# The results of detectors in the order in which they were asked, each with its kind.
KindResults = list[tuple[str, DetectorResult]]


class DetectorRunner:
    """Turns observations and the passing of time into the results of all detectors.

    A detector that raises does not affect the others: the error is counted by kind in ``failures``,
    and the detector is not asked for the same deadline again.
    """

    def __init__(self, detectors: Sequence[Detector]) -> None:
        self.detectors = detectors
        self.failures: Counter[str] = Counter()
        self._timed = [one for one in detectors if one.waits]
        # By type of observation.
        self._readers: dict[type, list[Detector]] = {}
        for detector in detectors:
            for seen in detector.reads:
                self._readers.setdefault(seen, []).append(detector)
        # By kind, the deadline at which the detector failed.
        self._failed: dict[str, float] = {}
        self._failure: Exception | None = None

    def deadline(self, put_off: Callable[[float], float] = float) -> float:
        """Return the earliest deadline of all detectors. put_off: delays a deadline."""
        return min([put_off(self._due(one)) for one in self._timed], default=NEVER)

    def is_due(self, now: float) -> bool:
        """Return whether a deadline has come. Every record asks, so nothing else is computed."""
        for detector in self._timed:
            if detector.state.deadline <= now and self._due(detector) <= now:
                return True
        return False

    def _due(self, detector: Detector) -> float:
        due: float = detector.state.deadline
        return due if self._failed.get(detector.kind) != due else NEVER

    def observe(self, seen: Observation) -> KindResults:
        """Return the results of all detectors that read the observation's type."""
        found: KindResults = []
        for detector in self._readers.get(type(seen), ()):
            try:
                if results := detector.observe(seen):
                    found += [(detector.kind, one) for one in results]
            except Exception as error:
                self._fail(detector, error)
        return found

    def expire(self, now: float, put_off: Callable[[float], float]) -> KindResults:
        """Return the results of detectors that are due. put_off: delays a deadline."""
        found: KindResults = []
        for detector in self._timed:
            due = self._due(detector)
            if put_off(due) > now:
                continue
            try:
                found += [(detector.kind, one) for one in detector.expire(now)]
            except Exception as error:
                self._failed[detector.kind] = due
                self._fail(detector, error)
        return found

    def forget(self, job: JobId) -> None:
        for detector in self.detectors:
            try:
                detector.forget(job)
            except Exception as error:
                self._fail(detector, error)

    def pop_failure(self) -> Exception | None:
        """Return the first error that a detector raised since the last call."""
        failure, self._failure = self._failure, None
        return failure

    def _fail(self, detector: Detector, error: Exception) -> None:
        self.failures[detector.kind] += 1
        self._failure = self._failure or error
