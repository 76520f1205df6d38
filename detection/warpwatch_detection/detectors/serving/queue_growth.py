"""Finds queues that grow without an end: more requests come than the server completes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from warpwatch_detection.detector import (
    Cleared,
    DetectorStatus,
    JobsDetector,
    Results,
    job_found,
    job_status,
)
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.records import Serve

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
