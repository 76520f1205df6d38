"""Finds servers whose KV cache is too small: requests lose their place, and are computed again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from warpwatch_detection.detector import Cleared, DetectorStatus, JobsDetector, Results
from warpwatch_telemetry.anomalies import Detected
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
    job_type = Preemptions

    def observe(self, seen: Serve) -> Results:
        job = self.state.jobs.get(seen.job_id)
        if not (seen.running or seen.waiting or seen.preemptions):
            # A worker does not know the requests; a scheduler without any is idle.
            idle = job is not None and job.on and seen.time - job.busy_time > IDLE_S
            return self._end(job, seen) if job is not None and idle else ()
        if job is None:
            job = self.state.jobs.setdefault(seen.job_id, Preemptions())
        job.busy_time, job.kv_usage = seen.time, seen.kv_usage
        job.recent = [*job.recent[1 - WINDOW_S :], seen.preemptions]
        job.running += RUNNING_WEIGHT * (seen.running - job.running)
        if job.on:
            return self._end(job, seen) if job.count < RELEASE * job.limit else ()
        # Most seconds have none.
        several = sum(count > 0 for count in job.recent) >= MIN_SECONDS
        if not seen.preemptions or not several or job.count < job.limit:
            return ()
        job.on = True
        return (self._found(job, seen),)

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            yield DetectorStatus(
                "found" if job.on else "fine",
                f"{job.count} requests preempted in {len(job.recent)} busy seconds",
                **name.fields(),
                value=job.count,
                limit=job.limit,
            )

    def _end(self, job: Preemptions, seen: Serve) -> Results:
        job.on = False
        return (Cleared(seen.time, seen.job_id),)

    @staticmethod
    def _found(job: Preemptions, seen: Serve) -> Detected:
        usage = "" if job.kv_usage is None else f", its use is {job.kv_usage:.0%}"
        return Detected(
            time=seen.time,
            severity="warning",
            **seen.job_id.fields(),
            value=job.count,
            baseline=0.0,
            summary=f"the KV cache is too small for the load: {job.count} requests lost their "
            f"place in {len(job.recent)} s and are computed again{usage}",
        )
