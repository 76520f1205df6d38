"""Finds the first failed rank of a job, and its cause: `crash` or `oom`.

If one rank fails, the others fail too. The first rank with a cause of its own is the culprit. A
rank that only reports a lost peer is considered after GRACE_S, if there is no better cause: a
killed process leaves no record, but its peers raise at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from warpwatch_detection.detector import (
    NEVER,
    Detector,
    DetectorStatus,
    Observation,
    job_found,
    job_status,
)
from warpwatch_telemetry.anomalies import Detected, Severity
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import End, RankEvent, RankSeen, Step

# Deaths are collected for this time before the first is named. Peers that live on for this time
# show that only one rank died.
GRACE_S = 5.0
# A lost peer may be noticed this much earlier than the end of its process.
NOTICED_S = 1.0
MAX_DETAIL = 160
MAX_JOBS = 256
# The most ended ranks of a job: more than a node has, and as many as a replayed log may have.
MAX_GONE = 4096
# Fields of an exception event.
EXCEPTION_FIELDS = ("exception", "type", "message", "detail")
_OUT_OF_MEMORY = re.compile(r"OutOfMemory|MemoryError|out of memory", re.IGNORECASE)
# Messages of torch.distributed, gloo, NCCL and sockets after the loss of a peer.
_PEER_LOST = re.compile(
    r"\bDist\w*Error|gloo|nccl|peer|Connection|Broken ?Pipe|socket|EOFError|timed? ?out",
    re.IGNORECASE,
)

# Messages of a program that a user ended, and of a launcher that had to stop it.
_INTERRUPTED = re.compile(r"KeyboardInterrupt|SIGTERM|SIGINT|SignalException.*\b(?:15|2)\b")


@dataclass(slots=True)
class Cause:
    """A cause of death. kind: crash or oom. severity: info if a user ended it on purpose."""

    kind: str
    rank: int | None
    text: str
    step: int | None
    severity: Severity = "warning"


@dataclass(slots=True)
class JobDeaths:
    """The ranks of one job.

    gone: the end times of ended ranks, oldest first. left: ranks of the run before a restart, whose
    end is ignored. died: the times of deaths without a verdict yet. lost_peer: when ranks raised
    because a peer was lost; said: their errors. oom_killed: ranks that the kernel killed.
    followers: ranks that failed because of the cause.
    """

    alive: set[int] = field(default_factory=set)
    gone: dict[int, float] = field(default_factory=dict)
    left: set[int] = field(default_factory=set)
    step: int | None = None
    died: dict[int, float] = field(default_factory=dict)
    lost_peer: dict[int, float] = field(default_factory=dict)
    said: dict[int, str] = field(default_factory=dict)
    oom_killed: set[int] = field(default_factory=set)
    cause: Cause | None = None
    followers: set[int] = field(default_factory=set)

    def leave(self, rank: int, time: float) -> None:
        self.alive.discard(rank)
        self.gone[rank] = time
        if len(self.gone) > MAX_GONE:
            oldest = next(iter(self.gone))
            del self.gone[oldest]
            self.followers.discard(oldest)

    @property
    def undecided(self) -> bool:
        return bool(self.died or self.lost_peer)

    def found_cause(self, kind: str) -> Cause | None:
        """Return the cause of death if it is of this kind."""
        return self.cause if self.cause is not None and self.cause.kind == kind else None


@dataclass(slots=True)
class DeathsState:
    jobs: dict[JobId, JobDeaths] = field(default_factory=dict)
    deadline: float = NEVER


class DeathDetector(Detector):
    """Reports causes of its ``kind``; both kinds evaluate all deaths, so they agree."""

    kind: str
    waits = True
    reads: tuple[type, ...] = (Step, RankSeen, RankEvent, End)

    def __init__(self) -> None:
        self.state = DeathsState()

    def observe(self, seen: Observation) -> Iterable[Detected]:
        if isinstance(seen, Step):
            self._step(seen)
        elif isinstance(seen, RankSeen):
            return self._rank_seen(seen)
        elif isinstance(seen, End) and seen.rank is not None:
            self._leave(seen)
        elif isinstance(seen, RankEvent) and seen.event in ("exception", "oom", "died"):
            return self._event(seen, self._job(seen.job_id))
        return ()

    def expire(self, now: float) -> Iterable[Detected]:
        found: list[Detected] = []
        for name, job in list(self.state.jobs.items()):
            if self._due(job) <= now:
                found += self._conclude(name, job, now)
                if not job.alive:
                    del self.state.jobs[name]
        self._schedule()
        return found

    def forget(self, job: JobId) -> None:
        """Remove the job, unless it has deaths without a verdict yet."""
        if job in self.state.jobs and not self.state.jobs[job].undecided:
            del self.state.jobs[job]

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            cause = job.found_cause(self.kind)
            text = f"{len(job.alive)} ranks live, {len(job.gone)} are gone"
            text += f": {cause.text}" if cause else ""
            yield job_status(name, cause, text, len(job.gone))

    # --- what happens ---

    def _job(self, name: JobId) -> JobDeaths:
        """Return the state of a job. If there are more than MAX_JOBS, the oldest is removed."""
        jobs: dict[JobId, JobDeaths] = self.state.jobs
        job = jobs.get(name)
        if job is None:
            if len(jobs) >= MAX_JOBS:
                del jobs[next(iter(jobs))]
            job = jobs[name] = JobDeaths()
        return job

    def _step(self, seen: Step) -> None:
        job = self._job(seen.job_id)
        job.step = seen.step
        if seen.rank in job.gone:
            return
        if seen.rank not in job.alive:
            job.alive.add(seen.rank)
            job.left.discard(seen.rank)
        # The rank survived the failure that it reported, e.g. a failed allocation that it caught.
        if job.cause is not None and job.cause.rank == seen.rank:
            job.cause = None
            job.followers.clear()
        job.lost_peer.pop(seen.rank, None)
        job.said.pop(seen.rank, None)

    def _rank_seen(self, seen: RankSeen) -> Iterable[Detected]:
        found: Iterable[Detected] = ()
        job = self.state.jobs.get(seen.job_id)
        if job is None or seen.rank in job.gone:
            left: set[int] = set()
            if job is not None:
                # The rank replaces one that is gone, so the job has been restarted. After a restart
                # of the daemon it can be the one that is gone, which began before it died.
                at = max([seen.time, *job.died.values(), *job.lost_peer.values()])
                found = self._conclude(seen.job_id, job, at) if job.undecided else ()
                left = job.alive | job.left
            job = self.state.jobs[seen.job_id] = JobDeaths(left=left)
            self._schedule()
        job.alive.add(seen.rank)
        job.left.discard(seen.rank)
        return found

    def _leave(self, seen: End) -> None:
        job = self.state.jobs.get(seen.job_id)
        if job is not None and seen.rank is not None:
            job.leave(seen.rank, seen.time)

    def _event(self, seen: RankEvent, job: JobDeaths) -> Iterable[Detected]:
        rank, text = seen.rank, error_line(seen.detail)
        if seen.event == "died":
            if rank in job.left:
                job.left.discard(rank)
                return ()
            job.leave(rank, seen.time)
            if seen.detail.get("oom_kill") is True:
                job.oom_killed.add(rank)
        if job.cause is not None:
            return self._follow(seen, job)
        if seen.event == "died":
            job.died[rank] = seen.time
        elif seen.event == "oom" or _OUT_OF_MEMORY.search(text):
            text = f"ran out of memory{f': {text}' if text else ''}"
            return self._decide(seen.job_id, job, seen.time, Cause("oom", rank, text, job.step))
        elif _PEER_LOST.search(text) and job.alive | job.gone.keys() > {rank}:
            job.lost_peer.setdefault(rank, seen.time)
            job.said.setdefault(rank, text)
        else:
            severity: Severity = "info" if _INTERRUPTED.search(text) else "warning"
            cause = Cause("crash", rank, f"raised {text or 'an exception'}", job.step, severity)
            return self._decide(seen.job_id, job, seen.time, cause)
        self._schedule()
        return ()

    def _follow(self, seen: RankEvent, job: JobDeaths) -> Iterable[Detected]:
        if job.cause is None or job.cause.rank == seen.rank or seen.rank in job.followers:
            return ()
        job.followers.add(seen.rank)
        return self._found(seen.job_id, job, seen.time)

    # --- what it means ---

    def _conclude(self, name: JobId, job: JobDeaths, now: float) -> Iterable[Detected]:
        """Name the cause after the grace; a death without an error has priority."""
        silent = {rank: time for rank, time in job.died.items() if rank not in job.lost_peer}
        after = "" if job.step is None else f" after step {job.step}"
        first = min(silent or job.lost_peer, key=lambda r: ({**job.lost_peer, **silent}[r], r))
        if silent and job.oom_killed & silent.keys():
            first = min(job.oom_killed & silent.keys(), key=lambda r: (silent[r], r))
            text = f"was killed by the kernel{after}: its control group ran out of memory"
            return self._decide(name, job, now, Cause("oom", first, text, job.step))
        if not silent:
            lost_s = job.lost_peer[first] + NOTICED_S
            left = [r for r, t in job.gone.items() if r not in job.lost_peer and t <= lost_s]
            text = "exited before its peers, which lost it" if left else f"raised {job.said[first]}"
            cause = Cause("crash", left[0] if left else first, text, job.step)
            return self._decide(name, job, now, cause)
        peers = (job.alive | job.lost_peer.keys()) - {first}
        if peers:
            text = f"died without an exit record{after}, {len(peers)} of its peers lived on"
            return self._decide(name, job, now, Cause("crash", first, text, job.step))
        count = len(job.died)
        rank = min(job.died) if count == 1 else None
        who, why = f"all {count} observed ranks were", "ended from outside"
        if rank is not None:
            who, why = f"rank {rank} was", "killed by a signal, or ended by os._exit"
        text = f"{who} gone without an exit record{after}: {why}"
        return self._keep(name, job, now, Cause("crash", rank, text, job.step, "info"))

    def _decide(self, name: JobId, job: JobDeaths, now: float, cause: Cause) -> Iterable[Detected]:
        """Keep the cause of one rank; the other deaths are its effects."""
        job.followers |= (job.died.keys() | job.lost_peer.keys()) - {cause.rank}
        cause.text = f"rank {cause.rank} {cause.text}"
        return self._keep(name, job, now, cause)

    def _keep(self, name: JobId, job: JobDeaths, now: float, cause: Cause) -> Iterable[Detected]:
        job.cause = cause
        job.died.clear()
        job.lost_peer.clear()
        job.said.clear()
        job.oom_killed.clear()
        self._schedule()
        return self._found(name, job, now)

    def _found(self, name: JobId, job: JobDeaths, now: float) -> Iterable[Detected]:
        cause = job.found_cause(self.kind)
        if cause is None:
            return ()
        text = cause.text + (f"; {len(job.followers)} more followed" if job.followers else "")
        about = {"rank": cause.rank, "step": cause.step}
        return (job_found(name, now, text, severity=cause.severity, **about),)

    @staticmethod
    def _due(job: JobDeaths) -> float:
        times = [*job.died.values(), *job.lost_peer.values()]
        return min(times, default=NEVER) + GRACE_S

    def _schedule(self) -> None:
        self.state.deadline = min(map(self._due, self.state.jobs.values()), default=NEVER)


class Crash(DeathDetector):
    kind = "crash"


class Oom(DeathDetector):
    kind = "oom"


def error_line(detail: Mapping[str, Any]) -> str:
    """Return the client's error on one line, bounded and without control characters."""
    said = ": ".join(str(detail[key]) for key in EXCEPTION_FIELDS if detail.get(key))
    line = " ".join(said.split())
    # In a summary the first "; " ends the cause.
    line = line.replace("; ", ", ")
    return "".join(letter for letter in line if letter.isprintable())[:MAX_DETAIL]
