"""No step for longer than anything the job has shown, or a process alive without a heartbeat."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from warpwatch.daemon.config import HangConfig
from warpwatch.daemon.detectors.base import NEVER, Fine, Found, Observation, Verdict
from warpwatch.daemon.detectors.capture_windows import CaptureWindows
from warpwatch.daemon.detectors.level import median
from warpwatch.telemetry.records import End, RankEvent, Step

# Survivors that wait for a dead rank have the crash's cause, not one of their own.
CRASH_QUIET_S = 600.0
# Steps whose median is the job's step time; the deadline follows it every RECHECK_STEPS.
RECENT_STEPS = 64
RECHECK_STEPS = 16


class _Job:
    def __init__(self) -> None:
        # Per live rank: time and number of its newest step. A rank counts from its first step on.
        self.last: dict[int, float] = {}
        self.step: dict[int, int] = {}
        self.stopped: dict[int, float] = {}
        self.durations_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self.steps = 0
        self.longest_gap_s = 0.0
        self.quiet_until = 0.0
        self.hung: set[int] = set()
        self.check_time = NEVER

    def remove(self, rank: int) -> None:
        self.last.pop(rank, None)
        self.step.pop(rank, None)
        self.stopped.pop(rank, None)
        self.hung.discard(rank)


class Hang:
    """One anomaly a job, named after a rank only where it is known whose fault it is."""

    kind = "hang"
    reads = (Step, RankEvent, End)

    def __init__(self, config: HangConfig, capture_timeout_s: float) -> None:
        self._config = config
        self._captures = CaptureWindows(capture_timeout_s)
        self._jobs: dict[str, _Job] = {}
        self._deadline = NEVER

    def observe(self, seen: Observation) -> Iterable[Verdict]:
        if type(seen) is Step:
            return self._step(seen)
        if isinstance(seen, RankEvent):
            return self._event(seen)
        if isinstance(seen, End) and seen.rank is not None:
            return self._gone(seen.job, seen.rank, seen.time)
        return ()

    def deadline(self) -> float:
        return self._deadline

    def expire(self, now: float) -> Iterable[Verdict]:
        verdicts: list[Verdict] = []
        for name, job in self._jobs.items():
            if job.check_time <= now:
                due = self._due(name, job, now)
                if due <= now:
                    verdicts.append(self._hang(name, job, now))
                    due = NEVER
                job.check_time = due
        self._schedule()
        return verdicts

    def forget(self, job: str) -> None:
        self._jobs.pop(job, None)
        self._captures.forget(job)
        self._schedule()

    def _step(self, seen: Step) -> Iterable[Verdict]:
        job = self._jobs.get(seen.job)
        if job is None:
            job = self._jobs[seen.job] = _Job()
        rank, last = seen.rank, job.last.get(seen.rank)
        # Where records are missing nobody knows how long the job paused.
        if (
            last is not None
            and seen.time - last > job.longest_gap_s
            and seen.step == job.step[rank] + 1
        ):
            self._gap(seen.job, job, seen.time, last)
        job.last[rank], job.step[rank] = seen.time, seen.step
        job.durations_s.append(seen.duration_s)
        job.steps += 1
        if last is None or job.steps < RECENT_STEPS or job.steps % RECHECK_STEPS == 0:
            self._recheck(seen.job, job, seen.time)
        if job.hung or job.stopped:
            return self._resumed(seen.job, job, rank, seen.time)
        return ()

    def _gap(self, name: str, job: _Job, now: float, last: float) -> None:
        """Remembers what pauses the job makes in health: no hang's, no crash's, no capture's."""
        excused = last < job.quiet_until or self._captures.runs_until(name, now)
        if not (job.hung or excused):
            job.longest_gap_s = now - last

    def _event(self, seen: RankEvent) -> Iterable[Verdict]:
        ended = self._captures.observe(seen)
        job = self._jobs.get(seen.job)
        if job is None:
            return ()
        if ended:
            job.quiet_until = max(job.quiet_until, seen.time)
            job.stopped.pop(seen.rank, None)
            self._recheck(seen.job, job, seen.time)
        if seen.event in ("died", "exception"):
            job.quiet_until = seen.time + CRASH_QUIET_S
        if seen.event == "died":
            return self._gone(seen.job, seen.rank, seen.time)
        if seen.event == "stopped":
            job.stopped[seen.rank] = seen.time
            if job.hung and job.durations_s:
                # Found by its silence alone; now it has a name.
                return (self._hang(seen.job, job, seen.time),)
            self._recheck(seen.job, job, seen.time)
        elif seen.event == "resumed" and job.stopped.pop(seen.rank, None) is not None:
            # All of its peers have waited for it; they get their time again.
            job.last = dict.fromkeys(job.last, seen.time)
            return self._resumed(seen.job, job, seen.rank, seen.time)
        return ()

    def _gone(self, name: str, rank: int, now: float) -> Iterable[Verdict]:
        job = self._jobs.get(name)
        if job is None:
            return ()
        was_hung = bool(job.hung)
        job.remove(rank)
        if was_hung and not job.hung:
            self._recheck(name, job, now)
            return (Fine(now, name),)
        return ()

    def _resumed(self, name: str, job: _Job, rank: int, now: float) -> Iterable[Verdict]:
        job.stopped.pop(rank, None)
        if rank not in job.hung:
            return ()
        job.hung.discard(rank)
        if job.hung:
            return ()
        self._recheck(name, job, now)
        return (Fine(now, name),)

    def _recheck(self, name: str, job: _Job, now: float) -> None:
        """The deadline is looked at again when it comes; steps meanwhile only move it back."""
        job.check_time = NEVER if job.hung or not job.last else self._due(name, job, now)
        self._schedule()

    def _schedule(self) -> None:
        self._deadline = min((job.check_time for job in self._jobs.values()), default=NEVER)

    def _limit_s(self, job: _Job) -> float:
        config = self._config
        limit_s = max(config.timeout_s, config.gap_factor * job.longest_gap_s)
        if job.durations_s:
            limit_s = max(limit_s, config.median_steps * median(job.durations_s))
        if job.steps <= config.warmup_steps * len(job.last):
            limit_s = max(limit_s, config.warmup_timeout_s)
        return limit_s

    def _due(self, name: str, job: _Job, now: float) -> float:
        """When the job counts as hung if nothing more comes."""
        if job.hung or not job.last:
            return NEVER
        idle_since = max(min(job.last.values()), job.quiet_until)
        due = idle_since + self._limit_s(job)
        if job.stopped:
            due = min(due, max(job.stopped.values()))
        if (capture_end := self._captures.runs_until(name, now)) is not None:
            due = max(due, capture_end)
        return due

    def _hang(self, name: str, job: _Job, now: float) -> Found:
        rank = self._culprit(job)
        idle_s = now - min(job.last.values())
        limit_s = self._limit_s(job)
        stuck = {r for r, last in job.last.items() if last + limit_s <= now}
        job.hung = ({rank} if rank is not None else stuck) & job.last.keys() or set(job.last)
        step = max(job.step.values())
        who = "no rank has finished a step" if rank is None else f"rank {rank} has finished no step"
        why = ", its process does not respond" if rank in job.stopped else ""
        typical = f"a step takes {median(job.durations_s):.3g} s"
        return Found(
            time=now,
            severity="critical",
            job=name,
            rank=rank,
            step=step,
            begin_step=step if rank is None else job.step.get(rank, step),
            value=idle_s,
            baseline=median(job.durations_s),
            summary=f"{who} for {idle_s:.0f} s ({typical}){why}",
        )

    def _culprit(self, job: _Job) -> int | None:
        """The one process that does not respond, or the only rank behind all of its peers."""
        stopped = [rank for rank in job.stopped if rank in job.step]
        if stopped:
            return stopped[0] if len(stopped) == 1 else None
        behind = min(job.step.values())
        last = [rank for rank, step in job.step.items() if step == behind]
        ahead = all(step > behind for rank, step in job.step.items() if rank != last[0])
        return last[0] if len(last) == 1 and ahead else None
