"""A rank that ended with an exception, or died while others lived on."""

from __future__ import annotations

from collections.abc import Iterable

from warpwatch.daemon.config import CrashConfig
from warpwatch.daemon.detectors.base import NEVER, Found, Observation, Verdict
from warpwatch.telemetry.records import End, RankEvent, RankSeen, Step

MAX_DETAIL = 160
# What an exception event may say of itself.
EXCEPTION_FIELDS = ("exception", "type", "message", "detail")


class _Job:
    def __init__(self) -> None:
        self.alive: set[int] = set()
        self.gone: set[int] = set()
        self.step: int | None = None
        # Deaths that nobody has judged yet: rank -> time.
        self.died: dict[int, float] = {}
        self.first: Found | None = None
        self.followers: set[int] = set()


class Crash:
    """One anomaly a job: the first rank is the cause, ranks that follow are its consequence."""

    kind = "crash"
    reads = (Step, RankSeen, RankEvent, End)

    def __init__(self, config: CrashConfig) -> None:
        self._grace_s = config.grace_s
        self._jobs: dict[str, _Job] = {}
        self._deadline = NEVER

    def observe(self, seen: Observation) -> Iterable[Verdict]:
        if type(seen) is Step:
            self._step(seen)
        elif isinstance(seen, RankSeen):
            self._rank_seen(seen)
        elif isinstance(seen, End) and seen.rank is not None:
            self._leave(seen.job, seen.rank)
        elif isinstance(seen, RankEvent) and seen.event == "exception":
            return self._exception(seen)
        elif isinstance(seen, RankEvent) and seen.event == "died":
            self._died(seen)
        return ()

    def deadline(self) -> float:
        return self._deadline

    def expire(self, now: float) -> Iterable[Verdict]:
        verdicts: list[Verdict] = []
        for name, job in list(self._jobs.items()):
            if job.died and min(job.died.values()) + self._grace_s <= now:
                verdicts.append(self._judge(name, job, now))
                job.died.clear()
                if not job.alive:
                    del self._jobs[name]
        self._schedule()
        return verdicts

    def forget(self, job: str) -> None:
        """Deaths still to be judged stay until they are."""
        if job in self._jobs and not self._jobs[job].died:
            del self._jobs[job]
            self._schedule()

    def _step(self, seen: Step) -> None:
        job = self._jobs.get(seen.job)
        if job is None:
            job = self._jobs[seen.job] = _Job()
        job.step = seen.step
        if seen.rank not in job.gone:
            job.alive.add(seen.rank)

    def _rank_seen(self, seen: RankSeen) -> None:
        job = self._jobs.get(seen.job)
        # A successor of a rank that is gone: the job has been restarted.
        if job is None or seen.rank in job.gone:
            job = self._jobs[seen.job] = _Job()
        job.alive.add(seen.rank)

    def _leave(self, name: str, rank: int) -> None:
        if job := self._jobs.get(name):
            job.alive.discard(rank)
            job.gone.add(rank)

    def _died(self, seen: RankEvent) -> None:
        job = self._jobs.setdefault(seen.job, _Job())
        self._leave(seen.job, seen.rank)
        if job.first is None or job.first.rank != seen.rank:
            job.died[seen.rank] = seen.time
            self._schedule()

    def _exception(self, seen: RankEvent) -> Iterable[Verdict]:
        job = self._jobs.setdefault(seen.job, _Job())
        what = ": ".join(str(seen.detail[key]) for key in EXCEPTION_FIELDS if key in seen.detail)
        text = f"rank {seen.rank} raised {printable(what) or 'an exception'}"
        return (self._crash(seen.job, job, seen.rank, seen.time, text),)

    def _judge(self, name: str, job: _Job, now: float) -> Found:
        rank = min(job.died, key=lambda r: (job.died[r], r))
        after = "" if job.step is None else f" after step {job.step}"
        if job.alive or job.first:
            others = f"{len(job.alive)} of its peers lived on"
            text = f"rank {rank} died without an exit record{after}, {others}"
            job.followers.update(other for other in job.died if other != rank)
            return self._crash(name, job, rank, now, text)
        count = len(job.died)
        who = f"all {count} local ranks were" if count > 1 else f"rank {rank} was"
        return Found(
            time=now,
            severity="info",
            job=name,
            rank=rank if count == 1 else None,
            step=job.step,
            summary=f"{who} gone without an exit record{after}: ended from outside",
        )

    def _crash(self, name: str, job: _Job, rank: int, time: float, text: str) -> Found:
        first = job.first
        if first is None:
            first = Found(time, "critical", text, job=name, rank=rank, step=job.step)
            job.first = first
        elif rank != first.rank:
            job.followers.add(rank)
        more = f"; {len(job.followers)} more followed" if job.followers else ""
        return Found(time, "critical", first.summary + more, name, first.rank, step=first.step)

    def _schedule(self) -> None:
        deaths = (time for job in self._jobs.values() for time in job.died.values())
        self._deadline = min((time + self._grace_s for time in deaths), default=NEVER)


def printable(text: str) -> str:
    """A client's text on one line, bounded, without control characters."""
    line = " ".join(text.split())
    return "".join(letter for letter in line if letter.isprintable())[:MAX_DETAIL]
