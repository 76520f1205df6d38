"""Finds servers whose KV cache is too small: requests lose their place, and are computed again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from warpwatch_detection.detector import (
    DetectorStatus,
    JobsDetector,
    Results,
    changed,
    job_found,
    job_status,
)
from warpwatch_telemetry.records import Serve

# Seconds with requests that are evaluated together: a burst is shorter.
WINDOW_S = 120
# The least preempted requests in the window (and at least as many as are served at once), and the
# least seconds with preemptions. One burst is not a fault.
# With a cache for nine of 24 requests vLLM preempts every third second on average, a few at once.
# The fault closes at a fifth.
MIN_PREEMPTIONS = 10
MIN_SECONDS = 3
RELEASE = 0.2
# Weight of a second in the mean of the requests that are served.
RUNNING_WEIGHT = 1 / 30
# After this time without requests the fault is over.
IDLE_S = 60.0


@dataclass(slots=True)
class Preemptions:
    """recent: requests that were preempted, by second with requests, the newest last.

    running: mean of the requests that are served.
    """

    recent: list[int] = field(default_factory=list)
    running: float = 0.0
    busy_time: float = 0.0
    kv_usage: float | None = None
    on: bool = False

    @property
    def count(self) -> int:
        return sum(self.recent)

    @property
    def limit(self) -> float:
        return max(float(MIN_PREEMPTIONS), self.running)


class KvThrash(JobsDetector[Preemptions]):
    kind = "kv_thrash"
    reads = (Serve,)
    state_of = Preemptions

    def observe(self, seen: Serve) -> Results:
        job = self.state.jobs.get(seen.job_id)
        if not (seen.running or seen.waiting or seen.preemptions):
            # A worker does not know the requests; a scheduler without any is idle.
            idle = job is not None and job.on and seen.time - job.busy_time > IDLE_S
            return self._decide(job, seen, False) if job is not None and idle else ()
        if job is None:
            job = self.state.jobs.setdefault(seen.job_id, Preemptions())
        job.busy_time, job.kv_usage = seen.time, seen.kv_usage
        job.recent = [*job.recent[1 - WINDOW_S :], seen.preemptions]
        job.running += RUNNING_WEIGHT * (seen.running - job.running)
        if job.on:
            return self._decide(job, seen, False) if job.count < RELEASE * job.limit else ()
        # Most seconds have none.
        several = sum(count > 0 for count in job.recent) >= MIN_SECONDS
        is_found = seen.preemptions and several and job.count >= job.limit
        return self._decide(job, seen, True) if is_found else ()

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            text = f"{job.count} requests preempted in {len(job.recent)} busy seconds"
            yield job_status(name, job.on, text, job.count, job.limit)

    @staticmethod
    def _decide(job: Preemptions, seen: Serve, is_found: bool) -> Results:
        was_on, job.on = job.on, is_found
        usage = "" if job.kv_usage is None else f", its use is {job.kv_usage:.0%}"
        text = (
            f"the KV cache is too small for the load: {job.count} requests lost their place in "
            f"{len(job.recent)} s and are computed again{usage}"
        )
        found = job_found(seen.job_id, seen.time, text, job.count, 0.0) if is_found else None
        return changed(seen.job_id, seen.time, was_on, found)
