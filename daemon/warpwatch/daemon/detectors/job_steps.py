"""Joins the steps that single ranks report into steps of the job.

A step is complete when every live rank has reported it. Records of ranks arrive in batches, so
a few steps wait for the slower reader; the wait is bounded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from warpwatch.daemon.detectors.base import JobStep
from warpwatch.daemon.detectors.capture_windows import CaptureWindows
from warpwatch.telemetry.records import End, RankEvent, Record, Step

# Steps that may wait for a rank; after that they are judged without it.
MAX_PENDING = 64
# A profiler's export still costs the steps that follow a capture.
STEPS_AFTER_CAPTURE = 5
# A step number this far back is a restart, not a late or repeated record.
RESTART_STEPS = MAX_PENDING


class _Job:
    __slots__ = ("emitted", "index", "masked_until", "newest", "pending")

    def __init__(self) -> None:
        self.newest: dict[int, int] = {}
        self.pending: dict[int, dict[int, Step]] = {}
        self.index = 0
        self.emitted = -1
        self.masked_until = -1


class JobSteps:
    """Records in, finished steps of whole jobs out. Memory: MAX_PENDING steps a rank."""

    def __init__(self, capture_timeout_s: float) -> None:
        self._jobs: dict[str, _Job] = {}
        self._captures = CaptureWindows(capture_timeout_s)

    def observe(self, record: Record) -> Sequence[JobStep]:
        if type(record) is Step:
            return self._step(record)
        if isinstance(record, RankEvent):
            self._event(record)
        elif isinstance(record, End) and record.rank is not None:
            self._gone(record.job, record.rank)
        return ()

    def forget(self, job: str) -> None:
        self._jobs.pop(job, None)
        self._captures.forget(job)

    def _event(self, record: RankEvent) -> None:
        job = self._jobs.get(record.job)
        if self._captures.observe(record) and job is not None:
            job.masked_until = max(job.newest.values(), default=-1) + STEPS_AFTER_CAPTURE
        if record.event == "died":
            self._gone(record.job, record.rank)

    def _gone(self, name: str, rank: int) -> None:
        if job := self._jobs.get(name):
            job.newest.pop(rank, None)

    def _step(self, record: Step) -> Sequence[JobStep]:
        job = self._jobs.get(record.job)
        if job is None:
            job = self._jobs[record.job] = _Job()
        if not 0.0 <= record.duration_s < math.inf:
            return ()
        number, newest = record.step, job.newest.get(record.rank, -1)
        if number <= newest:
            if number > newest - RESTART_STEPS and number > 0:
                return ()
            job = self._jobs[record.job] = _Job()
        job.newest[record.rank] = number
        if number <= job.emitted:
            return ()
        ranks = job.pending.get(number)
        if ranks is None:
            ranks = job.pending[number] = {}
        ranks[record.rank] = record
        if len(ranks) >= len(job.newest):
            return self._complete(job, number)
        if len(job.pending) > MAX_PENDING:
            oldest = min(job.pending)
            return self._emit(job, oldest, job.pending.pop(oldest))
        return ()

    def _complete(self, job: _Job, number: int) -> Sequence[JobStep]:
        """Emits the step; older ones still waiting lost a record and are dropped."""
        ranks = job.pending.pop(number)
        if job.pending:
            job.pending = {later: steps for later, steps in job.pending.items() if later > number}
        return self._emit(job, number, ranks)

    def _emit(self, job: _Job, number: int, ranks: dict[int, Step]) -> Sequence[JobStep]:
        job.emitted = number
        some = next(iter(ranks.values()))
        if number <= job.masked_until or self._captures.runs_until(some.job, some.time) is not None:
            return ()
        joined = join(ranks, job.index)
        job.index += 1
        return (joined,)


def join(ranks: dict[int, Step], index: int) -> JobStep:
    """One step of several ranks; every rank's phases are disjoint parts of its duration."""
    compute_s: dict[int, float] = {}
    data_wait_s: dict[int, float] = {}
    durations: list[float] = []
    comm_s = math.inf
    time = 0.0
    for rank, step in ranks.items():
        duration, comm, wait = step.duration_s, 0.0, 0.0
        if phases := step.phases_s:
            comm, wait = phases.get("comm", 0.0), phases.get("data_wait", 0.0)
            if "checkpoint" in phases or "eval" in phases:
                duration -= phases.get("checkpoint", 0.0) + phases.get("eval", 0.0)
        compute_s[rank] = max(0.0, duration - comm - wait)
        data_wait_s[rank] = wait
        durations.append(duration)
        comm_s = min(comm_s, comm)
        time = max(time, step.time)
    middle = (len(durations) - 1) // 2
    return JobStep(
        time=time,
        job=step.job,
        step=step.step,
        index=index,
        duration_s=sorted(durations)[middle],
        common_s=sorted(compute_s.values())[middle] + comm_s,
        compute_s=compute_s,
        data_wait_s=data_wait_s,
    )
