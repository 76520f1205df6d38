"""What the coordinator needs of whoever records: a backend, which begins sessions.

A session is one capture. The backend says whom it can capture and begins; everything else is the
session's: what it says to the processes and what it hears of them.

A session's life, all of it under the coordinator's lock but ``collect``:

1. ``begin`` has asked the processes; ``ranks`` are ``asked``.
2. ``observe`` brings the events of ranks, ``advance`` the time. They move ``ranks`` on
   (telemetry.captures.RANK_STATES) and set ``capture.start_step`` and ``capture.recording_time``.
3. ``advance`` answers True once every rank is in RANK_ENDS or ``exported``; or ``cancel`` ends it
   early. After that the session hears nothing more.
4. ``collect`` takes over each rank's files, in the finisher's thread, whatever its state is.
"""

from __future__ import annotations

import logging
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

from warpwatch_capturing.board import LiveRank
from warpwatch_capturing.children.verification import Expectation
from warpwatch_telemetry.captures import (
    RANK_ENDS,
    Capture,
    CaptureRequest,
    RankCapture,
)
from warpwatch_telemetry.errors import Refused, WarpwatchError
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent

logger = logging.getLogger(__name__)

# A wrong name is answered with so many right ones.
MAX_NAMED = 20


class FetchError(WarpwatchError):
    """A file of a rank that cannot be taken over."""


class CaptureSession(ABC):
    """One capture while it runs. ``at`` is monotonic.

    capture: as it was begun; its ``ranks`` are not kept up to date, ``ranks`` are.
    """

    def __init__(self, capture: Capture, numbers: Iterable[int]) -> None:
        self.capture = capture
        self.ranks = {number: RankCapture(number) for number in numbers}

    @abstractmethod
    def observe(self, event: RankEvent | End, at: float) -> None: ...

    @abstractmethod
    def advance(self, at: float) -> bool:
        """Whether every rank has ended or left its files."""

    def cancel(self, detail: str = "") -> None:
        """Say to every rank that brought nothing that it is no longer waited for.

        With ``detail`` those that have not ended yet are ``missing`` for that reason.
        """
        for number, rank in self.ranks.items():
            if detail and not is_over(rank):
                self.ranks[number] = rank = replace(rank, state="missing", detail=detail)
            self._withdraw(rank)

    @abstractmethod
    def _withdraw(self, rank: RankCapture) -> None:
        """Take back what was asked of it, where it has not begun."""

    def collect(self, number: int, folder: Path) -> tuple[RankCapture, tuple[str, ...]]:
        """Put what the rank brought into ``folder``: the rank as it is now, and the files' names.

        ``written`` with ``file`` when its main file is there, else an end with its ``detail``.
        Raises nothing for what a process did.
        """
        rank = self.ranks[number]
        try:
            return self._taken(rank, folder)
        except FetchError as error:
            return replace(rank, state="failed", detail=str(error)), ()
        except OSError as error:
            return replace(rank, state="failed", detail=f"the store: {error.strerror}"), ()

    @abstractmethod
    def _taken(self, rank: RankCapture, folder: Path) -> tuple[RankCapture, tuple[str, ...]]:
        """As ``collect``. Raises FetchError for a bad file, OSError for the store."""

    @abstractmethod
    def expectation(self, number: int) -> Expectation | None:
        """What the rank's trace must hold; None: it is no trace."""


class CaptureBackend(Protocol):
    """Starts captures of the ranks it reaches."""

    def jobs(self) -> Collection[JobId]:
        """The jobs that have a live rank."""
        ...

    def ranks(self, job: JobId) -> Mapping[int, int]:
        """The job's live ranks that this backend reaches, each with its world size."""
        ...

    def events_per_step(self, job: JobId) -> int | None:
        """The most that a rank says a recorded step of its brings; None: not known."""
        ...

    def pace(self, job: JobId, numbers: Collection[int]) -> Pace:
        """How far these ranks are."""
        ...

    def begin(self, capture: Capture, numbers: Sequence[int], at: float) -> CaptureSession:
        """Ask these ranks. ``capture.steps`` are to be recorded. Raises Refused.

        A ``capture.start_step`` that is there already is kept, however late a rank is.
        """
        ...


def is_over(rank: RankCapture) -> bool:
    """Whether nothing more is expected of the rank, but perhaps its files."""
    return rank.state in RANK_ENDS or rank.state == "exported"


def choose(
    backend: CaptureBackend, request: CaptureRequest
) -> tuple[CaptureRequest, list[int], int]:
    """(the request with its job's owner and run, which ranks, of how many). Raises Refused."""
    job = _find(backend, request)
    ranks = backend.ranks(job)
    unknown = sorted(set(request.ranks or ()) - set(ranks))
    if unknown:
        names, known = ", ".join(map(str, unknown)), ", ".join(map(str, sorted(ranks)))
        raise Refused(
            "refused_no_rank", f"{request.job} has no running rank {names} here, only {known}"
        )
    numbers = sorted(ranks if request.ranks is None else set(request.ranks))
    world_size = max(ranks[number] for number in numbers)
    return replace(request, **job.fields()), numbers, world_size


def _find(backend: CaptureBackend, request: CaptureRequest) -> JobId:
    """The one job that is meant. Raises Refused."""
    jobs = sorted(job for job in backend.jobs() if _is_meant(job, request))
    if len(jobs) > 1:
        owners = ", ".join(job.owner for job in jobs)
        raise Refused(
            "refused_no_rank", f"{request.job} is a job of each of {owners}; name the owner"
        )
    if jobs and backend.ranks(jobs[0]):
        return jobs[0]
    found = {job.name for job in backend.jobs() if request.owner in ("", job.owner)}
    names = ", ".join(sorted(found)[:MAX_NAMED]) or "none"
    raise Refused(
        "refused_no_rank",
        f"no running rank of job {request.job!r} is known; running jobs: {names}",
    )


def _is_meant(job: JobId, request: CaptureRequest) -> bool:
    """What the request leaves open may be anything."""
    asked = request.job_id
    return all(said in ("", known) for said, known in zip(asked, job, strict=True))


def check_start(
    backend: CaptureBackend, request: CaptureRequest, numbers: Sequence[int], start_step: int
) -> None:
    """Raises Refused where the step before it, the lead-in, has begun."""
    begun = backend.pace(request.job_id, numbers).begun
    if begun >= start_step - 1:
        raise Refused("refused_over", f"step {start_step} is too early: step {begun} has begun")


def has_ended(session: CaptureSession, at: float) -> bool:
    """Whether it has ended, and its ranks know. A session with a fault is over too."""
    try:
        if not session.advance(at):
            return False
        session.cancel()
    except Exception:
        logger.exception("capture %s is given up", session.capture.id)
    return True


def cancel_safely(session: CaptureSession, detail: str) -> None:
    """Also one with a fault."""
    try:
        session.cancel(detail)
    except Exception:
        logger.exception("capture %s", session.capture.id)


def shown(session: CaptureSession) -> Capture:
    """The capture with its ranks as they are now."""
    return replace(session.capture, ranks=tuple(session.ranks.values()))


# No rank is further ahead of its peers than this, whatever it says.
MAX_AHEAD_STEPS = 1000


class Pace(NamedTuple):
    """begun: the newest step that the fastest rank has begun. step_s: its median; 0: not known."""

    begun: int
    step_s: float


def fastest(begun: Iterable[int]) -> int:
    """Ranks step together: one far from the median is no measure for the others."""
    known = sorted(begun)
    middle = known[(len(known) - 1) // 2]
    return max(step for step in known if step <= middle + MAX_AHEAD_STEPS)


def median_step_s(ranks: Iterable[LiveRank], choose: Callable[[list[float]], float]) -> float:
    """The median step seconds of the fastest (min) or slowest (max) rank; 0: not known."""
    recent = [list(rank.recent) for rank in ranks]
    return choose([statistics.median(steps_s) for steps_s in recent if steps_s] or [0.0])
