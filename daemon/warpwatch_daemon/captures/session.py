"""What the coordinator needs of whoever records: a backend, which begins sessions.

A session is one capture. A backend says whom it can capture and begins; everything else is the
session's: what it says to the processes and what it hears of them. Backends are tried in order:
the first one that does the kind and knows the job takes the request, unless the request names one.
To add one: a class that is a CaptureBackend, given to the Coordinator in ``backends``.

A session's life, all of it under the coordinator's lock but ``collect``:

1. ``begin`` has asked the processes; ``ranks`` are ``asked``.
2. ``observe`` brings the events of ranks, ``advance`` the time. They move ``ranks`` on
   (telemetry.captures.RANK_STATES) and set ``capture.start_step`` and ``capture.recording_time``.
3. ``advance`` answers True once every rank is in RANK_ENDS or ``exported``; or ``cancel`` ends it
   early. After that the session hears nothing more.
4. ``collect`` takes over each rank's files, in the finisher's thread, whatever its state is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from warpwatch_daemon.captures.verification import Expectation
from warpwatch_telemetry.captures import (
    RANK_ENDS,
    Capture,
    CaptureKind,
    CaptureRequest,
    RankCapture,
)
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.records import End, RankEvent

# A wrong name is answered with so many right ones.
MAX_NAMED = 20


class CaptureSession(Protocol):
    """One capture while it runs. ``at`` is monotonic.

    capture: as it was begun; its ``ranks`` are not kept up to date, ``ranks`` are.
    """

    capture: Capture
    ranks: dict[int, RankCapture]

    def observe(self, event: RankEvent | End, at: float) -> None: ...

    def advance(self, at: float) -> bool:
        """Whether every rank has ended or left its files."""
        ...

    def cancel(self, detail: str = "") -> None:
        """Say to every rank that brought nothing that it is no longer waited for.

        With ``detail`` those that have not ended yet are ``missing`` for that reason.
        """
        ...

    def collect(self, number: int, folder: Path) -> tuple[RankCapture, tuple[str, ...]]:
        """Put what the rank brought into ``folder``: the rank as it is now, and the files' names.

        ``written`` with ``file`` when its main file is there, else an end with its ``detail``.
        Raises nothing for what a process did.
        """
        ...

    def expectation(self, number: int) -> Expectation | None:
        """What the rank's trace must hold; None: it is no trace."""
        ...


class CaptureBackend(Protocol):
    """Who can be captured in one way. name: of telemetry.captures.BACKENDS."""

    name: str
    kinds: frozenset[CaptureKind]

    def jobs(self) -> Collection[str]:
        """The names of the jobs that have a live rank."""
        ...

    def ranks(self, job: str) -> Mapping[int, int]:
        """The job's live ranks that this backend reaches, each with its world size."""
        ...

    def owner(self, job: str) -> int | None:
        """The UID of the job's live ranks; None: it has none, or they are of several users."""
        ...

    def events_per_step(self, job: str) -> int | None:
        """The most that a rank says a recorded step of its brings; None: not known."""
        ...

    def begin(self, capture: Capture, numbers: Sequence[int], at: float) -> CaptureSession:
        """Ask these ranks. ``capture.steps`` are to be recorded. Raises Refused."""
        ...


def is_over(rank: RankCapture) -> bool:
    """Whether nothing more is expected of the rank, but perhaps its files."""
    return rank.state in RANK_ENDS or rank.state == "exported"


def choose(
    backends: Sequence[CaptureBackend], request: CaptureRequest
) -> tuple[CaptureBackend, list[int], int]:
    """(who captures, which ranks, of how many). Raises Refused."""
    named = [backend for backend in backends if request.backend in (None, backend.name)]
    able = [backend for backend in named if request.kind in backend.kinds]
    if not able:
        how = f" by the back end {request.backend}" if request.backend else ""
        raise Refused("refused_disabled", f"nothing here captures {request.kind}{how}")
    live = next(
        (
            (b, ranks)
            for b in able
            if (ranks := b.ranks(request.job)) and _is_of(b, request.job, request.owner_uid)
        ),
        None,
    )
    if live is None:
        found = {job for b in able for job in b.jobs() if _is_of(b, job, request.owner_uid)}
        names = ", ".join(sorted(found)[:MAX_NAMED]) or "none"
        raise Refused(
            "refused_no_rank",
            f"no running rank of job {request.job!r} is known; running jobs: {names}",
        )
    backend, ranks = live
    unknown = sorted(set(request.ranks or ()) - set(ranks))
    if unknown:
        names, known = ", ".join(map(str, unknown)), ", ".join(map(str, sorted(ranks)))
        raise Refused(
            "refused_no_rank", f"{request.job} has no running rank {names} here, only {known}"
        )
    numbers = sorted(ranks if request.ranks is None else set(request.ranks))
    return backend, numbers, max(ranks[number] for number in numbers)


def _is_of(backend: CaptureBackend, job: str, owner_uid: int | None) -> bool:
    """Whether the job is this user's; None: anybody's will do."""
    return owner_uid is None or backend.owner(job) == owner_uid


def only_owner(uids: Iterable[int]) -> int | None:
    """The UID that all of them are, None where they are of several users or none."""
    found = set(uids)
    return found.pop() if len(found) == 1 else None
