"""Finds servers that cannot keep up: a KV cache that is too small, a queue that never ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from warpwatch_detection.detector import (
    Cleared,
    DetectorStatus,
    JobsDetector,
    Results,
    changed,
    job_found,
    job_status,
)
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
    """Finds a KV cache that is too small: requests lose their place, and are computed again."""

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


# A queue's mean per block must grow in this many blocks in a row. A burst ends sooner.
BLOCK_S = 120.0
GROWING_BLOCKS = 5
# Growth of a block, as a share of the queue and in requests, that is more than chance.
MIN_GROWTH, MIN_REQUESTS = 0.05, 2.0
# A shorter queue is harmless: it must hold as many requests as are served at once.
MIN_WAITING = 16.0


@dataclass(slots=True)
class Queue:
    """means: the newest whole blocks' means. total, seconds: the sums of the unfinished block.

    on: the queue's length when it was found, 0 while it is fine.
    """

    block_time: float
    total: float = 0.0
    seconds: int = 0
    running: int = 0
    means: list[float] = field(default_factory=list)
    on: float = 0.0

    @property
    def grows(self) -> bool:
        pairs = zip(self.means, self.means[1:], strict=False)
        grown = [new - old > max(MIN_REQUESTS, MIN_GROWTH * old) for old, new in pairs]
        long = max(MIN_WAITING, float(self.running))
        return len(grown) == GROWING_BLOCKS and all(grown) and self.means[-1] > long


class QueueGrowth(JobsDetector[Queue]):
    """Finds a queue that grows without an end: more requests come than are completed."""

    kind = "queue_growth"
    reads = (Serve,)
    state_of = Queue

    def observe(self, seen: Serve) -> Results:
        """Evaluate a second of the process that has the queue."""
        job = self.state.jobs.get(seen.job_id)
        if not (seen.running or seen.waiting):
            # A worker does not know the queue; without a request, nothing is found any more.
            if job is None or seen.time - job.block_time < 2 * BLOCK_S:
                return ()
            del self.state.jobs[seen.job_id]
            return (Cleared(seen.time, seen.job_id),) if job.on else ()
        if job is None:
            job = self.state.jobs.setdefault(seen.job_id, Queue(seen.time))
        job.total += seen.waiting
        job.seconds += 1
        job.running = seen.running
        if seen.time - job.block_time < BLOCK_S:
            return ()
        mean, job.block_time = job.total / job.seconds, seen.time
        job.total, job.seconds = 0.0, 0
        job.means = [*job.means[-GROWING_BLOCKS:], mean]
        if job.on:
            return self._go_on(job, mean, seen)
        if not job.grows:
            return ()
        job.on = mean
        return (self._found(job, seen),)

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            mean = job.means[-1] if job.means else 0.0
            text = f"{mean:.0f} requests wait, {job.running} are served"
            yield job_status(name, job.on, text, mean, MIN_WAITING)

    def _go_on(self, job: Queue, mean: float, seen: Serve) -> Results:
        if mean < job.on / 2:
            job.on, job.means = 0.0, [mean]
            return (Cleared(seen.time, seen.job_id),)
        return (self._found(job, seen),)

    @staticmethod
    def _found(job: Queue, seen: Serve) -> Detected:
        minutes = (len(job.means) - 1) * BLOCK_S / 60
        text = (
            f"requests come faster than they are served: {job.means[-1]:.0f} wait, "
            f"{job.means[0]:.0f} did {minutes:.0f} min ago; {job.running} are served at once"
        )
        return job_found(seen.job_id, seen.time, text, job.means[-1], job.means[0])
