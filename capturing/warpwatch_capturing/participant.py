"""The interfaces of captures: places that take part, the jobs they know, and the process around.

A place is the local ranks, or the agent of another node.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from warpwatch_capturing.config import TriggersConfig
from warpwatch_capturing.verification import Expectation
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_telemetry.captures import RANK_ENDS, Capture, CaptureRequest, Prepared, RankCapture
from warpwatch_telemetry.errors import Refused, WarpwatchError
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent
from warpwatch_telemetry.state import RankState


class FetchError(WarpwatchError):
    """A file of a rank that cannot be fetched."""


class Reach(NamedTuple):
    """How fast ranks can be reached.

    margin_s, margin_steps: the least distance from the fastest rank's newest step to the start
    step; the time doubles at each attempt. pause_s: the shortest and the longest pause between
    attempts.
    """

    margin_s: float
    margin_steps: int
    pause_s: tuple[float, float] = (0.0, 0.0)


class Collected(NamedTuple):
    """The files of a rank.

    files: names in the capture's folder. read: the one for the diagnosis, if any. baseline: one of
    the same rank while its job was healthy, if there is one.
    """

    rank: RankCapture
    files: tuple[str, ...] = ()
    read: str | None = None
    baseline: str | None = None


class Participant(ABC):
    """A place that takes part in one capture. ``at`` is monotonic.

    All methods but ``collect`` return at once. ``prepare`` and ``arm`` set ``answer``, or
    ``is_awaited`` until it arrives: Prepared or None if the participant accepts, else why not.

    ranks: the present state by number. node: None for this node. lost: why the participant brings
    nothing more. recording_time: the wall clock when the first rank started to record. fetches:
    the number of files that are fetched at once.
    """

    reach: Reach
    node: str | None = None

    def __init__(self, numbers: Iterable[int]) -> None:
        self.ranks = {number: RankCapture(number) for number in numbers}
        self.answer: Prepared | Exception | None = None
        self.is_awaited = False
        self.lost = ""
        self.recording_time: float | None = None
        self.fetches = 1

    @abstractmethod
    def prepare(self, request: CaptureRequest, at: float) -> None:
        """Request how far the ranks are. Nothing is reserved."""

    @abstractmethod
    def arm(self, capture: Capture, attempt: int, at: float) -> None:
        """Request ``capture.steps`` from ``capture.start_step`` on, or stacks at once."""

    @abstractmethod
    def withdraw(self) -> None:
        """Take back this attempt: another follows, or none at all."""

    @abstractmethod
    def cancel(self, detail: str = "") -> None:
        """Tell ranks that brought nothing that they are no longer waited for.

        With ``detail`` those that have not ended yet are ``missing`` for that reason.
        """

    @abstractmethod
    def observe(self, event: RankEvent | End, at: float) -> None:
        """Apply what happened to a rank of this node."""

    @abstractmethod
    def advance(self, at: float) -> None:
        """Update ``ranks``; those that are overdue are ``missing``."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether nothing more is expected, except perhaps files."""

    @abstractmethod
    def has_passed(self, number: int, start_step: int, at: float) -> bool:
        """Return whether a rank that has not answered can no longer record the start step."""

    def lose(self, why: str) -> None:
        """Expect nothing more of the participant."""
        self.lost = why
        for number, rank in self.ranks.items():
            if rank.state not in RANK_ENDS:
                self.ranks[number] = replace(rank, state="missing", detail=why)

    def collect(self, number: int, folder: Path) -> Collected:
        """Put what the rank brought into ``folder``, from any thread; it blocks."""
        rank = self.ranks[number]
        try:
            return self._fetched(rank, folder)
        except FetchError as error:
            why = str(error)
        except OSError as error:
            why = f"the store: {error.strerror}"
        # A trace on another node is still there.
        elsewhere = (rank.file,) if rank.file else ()
        return Collected(self._without_file(rank, why), elsewhere)

    @abstractmethod
    def _fetched(self, rank: RankCapture, folder: Path) -> Collected:
        """Fetch as ``collect``. Raises FetchError for a bad file, OSError for the store."""

    def _without_file(self, rank: RankCapture, why: str) -> RankCapture:
        return replace(rank, state="failed", detail=why)

    @abstractmethod
    def expectation(self, number: int) -> Expectation | None:
        """Return what the rank's trace must contain, or None if it is not verified here."""

    def shortcomings(self, ranks: Iterable[RankCapture]) -> Iterator[str]:
        """Yield why the capture is not complete. ``ranks``: the participant's, at the end."""
        for rank in ranks:
            if rank.state != "written":
                yield f"rank {rank.rank}: {rank.detail or rank.state}"
            elif rank.problems:
                yield f"rank {rank.rank} is not verified ({'; '.join(rank.problems)})"


def is_over(rank: RankCapture) -> bool:
    """Return whether nothing more is expected of the rank, except perhaps its files."""
    return rank.state in RANK_ENDS or rank.state == "exported"


# Limits the claim of a rank to be ahead of its peers.
MAX_AHEAD_STEPS = 1000


def fastest(begun: Iterable[int]) -> int:
    """Return the newest step; ranks step together, so one far from the median is ignored."""
    known = sorted(begun)
    middle = known[(len(known) - 1) // 2]
    return max(step for step in known if step <= middle + MAX_AHEAD_STEPS)


def steps_ahead(reach: Reach, attempt: int, waited_s: float, step_s: float) -> int:
    """Return the steps between the fastest rank and the start step.

    ``waited_s``: how long ranks went on while answers were awaited; ``step_s``: 0 if not known.
    """
    margin_s = reach.margin_s * 2 ** (attempt - 1) + waited_s
    in_time = min(margin_s / step_s, MAX_AHEAD_STEPS) if step_s > 0 else 0
    return max(reach.margin_steps, math.ceil(in_time))


# The reply to a wrong name lists at most this many right ones.
MAX_NAMED = 20


class LiveJob(NamedTuple):
    """A job, and its ranks that run and can be captured.

    events_per_step: the most that a rank claims to record, if it is known.
    """

    id: JobId
    ranks: Collection[int]
    world_size: int
    events_per_step: int | None = None


def find_job(jobs: Iterable[LiveJob], request: CaptureRequest) -> LiveJob:
    """Return the one job that the request names, with all ranks that it names. Raises Refused."""
    live = [job for job in jobs if job.ranks]
    named = [job for job in live if _is_named(job.id, request)]
    if len({(job.id.owner, job.id.name) for job in named}) > 1:
        owners = ", ".join(sorted(job.id.owner for job in named))
        raise Refused(
            "refused_no_rank", f"{request.job} is a job of each of {owners}; name the owner"
        )
    if not named:
        names = {job.id.name for job in live if request.owner in ("", job.id.owner)}
        known = ", ".join(sorted(names)[:MAX_NAMED]) or "none"
        raise Refused(
            "refused_no_rank",
            f"no running rank of job {request.job!r} is known; running jobs: {known}",
        )
    # Replicas of a server have one name and do the same.
    job = min(named)
    unknown = sorted(set(request.ranks or ()) - set(job.ranks))
    if unknown:
        wrong, right = ", ".join(map(str, unknown)), ", ".join(map(str, sorted(job.ranks)))
        raise Refused(
            "refused_no_rank", f"{request.job} has no running rank {wrong} here, only {right}"
        )
    return job


def _is_named(job: JobId, request: CaptureRequest) -> bool:
    """Return whether the request matches the job; an empty field matches any."""
    return all(asked in ("", known) for asked, known in zip(request.job_id, job, strict=True))


# --- the process in which captures run ---


class Board(Protocol):
    """The state of the process. Every method may be called from any thread."""

    @property
    def metrics(self) -> AgentMetrics: ...

    def ranks(self) -> tuple[RankState, ...]:
        """Return the ranks that are available now."""

    def publish(self, **parts: Any) -> None:
        """Replace fields of the state, such as ``captures`` or ``decisions``."""


class RunningRank(Protocol):
    """A rank that runs here.

    recent: the durations of its newest steps, in seconds. device: the UUID of its GPU.
    """

    status: str

    @property
    def recent(self) -> Iterable[float]: ...

    @property
    def world_size(self) -> int: ...

    @property
    def device(self) -> str | None: ...


class Capturer(Protocol):
    """The service of a node or the captures of a fleet, for those that request captures.

    config: a reload replaces it.
    """

    @property
    def config(self) -> TriggersConfig: ...

    def request(self, request: CaptureRequest) -> Capture:
        """Start a capture. Raises Refused."""

    def captures(self) -> Sequence[Capture]:
        """Return all captures, oldest first."""

    def capture(self, capture_id: str) -> Capture | None:
        """Return a capture by its id."""

    def is_busy(self, job: JobId) -> bool:
        """Return whether a capture of the job runs."""
