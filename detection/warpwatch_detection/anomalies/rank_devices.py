"""Which ranks live, and on which device each of them runs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TypeVar

from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.newest import put_newest
from warpwatch_telemetry.records import DeviceReading

# A death is judged seconds later; the rank's device must still be known then.
DEPARTED_S = 600.0
MAX_DEPARTED = 4096
# GPUs that are divided anew have new UUIDs each time.
MAX_INDICES = 1024

RankId = tuple[JobId, int]
F = TypeVar("F", bound=Detected)


@dataclass(slots=True)
class LiveRank:
    """seen_time, step_time: of the newest RankSeen and Step; older ones were read before.

    step: the number of the newest.
    """

    device: str | None = None
    world_size: int = 1
    step: int = -1
    seen_time: float = float("-inf")
    step_time: float = float("-inf")


@dataclass(slots=True)
class RankDevices:
    """Live ranks by job and number; jobs in the order in which they began.

    departed: device and time of the end of ranks that are gone, in the order of their end.
    indices: of GPUs by their UUID, as last read.
    """

    jobs: dict[JobId, dict[int, LiveRank]] = field(default_factory=dict)
    departed: dict[RankId, tuple[str, float]] = field(default_factory=dict)
    indices: dict[str, int] = field(default_factory=dict)

    def observe(self, reading: DeviceReading) -> None:
        device, index = reading.device, reading.index
        if index is not None and self.indices.get(device) != index:
            put_newest(self.indices, device, index, MAX_INDICES)

    def find(self, job: JobId, rank: int) -> LiveRank | None:
        try:
            return self.jobs[job][rank]
        except KeyError:
            return None

    def spans_nodes(self, job: JobId) -> bool:
        """Whether it has more ranks than are seen here; a fleet sees them all, and their nodes."""
        ranks = self.jobs.get(job, {})
        return len(ranks) < max((rank.world_size for rank in ranks.values()), default=0)

    def live(self) -> dict[RankId, LiveRank]:
        return {
            (job, number): rank
            for job, ranks in self.jobs.items()
            for number, rank in ranks.items()
        }

    def leave(self, job: JobId, rank: int, time: float) -> None:
        left = self.jobs.get(job, {}).pop(rank, None)
        if left is None or left.device is None:
            return
        self.departed.pop((job, rank), None)
        self.departed[job, rank] = (left.device, time)
        for name, (_, gone) in list(self.departed.items()):
            if time - gone <= DEPARTED_S and len(self.departed) <= MAX_DEPARTED:
                break
            del self.departed[name]

    def longest_silent(self, owner: str | None = None) -> tuple[JobId, float]:
        """The owner's job that has shown nothing for longest, and when it last did.

        ``owner`` None: of all jobs. There must be one.
        """
        heard = {
            job: max((max(rank.seen_time, rank.step_time) for rank in ranks.values()), default=0.0)
            for job, ranks in self.jobs.items()
            if owner in (None, job.owner)
        }
        job = min(heard, key=lambda name: heard[name])
        return job, heard[job]

    def device(self, job: JobId, rank: int) -> str | None:
        """Also of a rank that died a moment ago."""
        live = self.find(job, rank)
        if live is not None:
            return live.device
        device, _ = self.departed.get((job, rank), (None, 0.0))
        return device

    def newest_step(self, job: JobId | None) -> int:
        """Return the newest step of any rank, -1 without one."""
        ranks = self.jobs.get(job, {}) if job is not None else {}
        return max((rank.step for rank in ranks.values()), default=-1)

    def devices(self, job: JobId) -> set[str]:
        ranks = self.jobs.get(job, {})
        return {rank.device for rank in ranks.values() if rank.device is not None}

    def jobs_on(self, device: str) -> set[JobId]:
        return {job for job, _ in self._on(device)}

    def occupant(self, device: str) -> tuple[JobId | None, int | None]:
        """The job and rank on the device; what is not the only one there is None."""
        there = self._on(device)
        jobs = {job for job, _ in there}
        return (
            there[0][0] if len(jobs) == 1 else None,
            there[0][1] if len(there) == 1 else None,
        )

    def located(self, found: Detected) -> Detected:
        """With the job and rank on the device, or the device of the rank, and its index."""
        job, rank, device = found.job_id, found.rank, found.device
        if job is None and device is not None:
            job, rank = self.occupant(device)
        elif job is not None and rank is not None and device is None:
            device = self.device(job, rank)
        gpu = self.indices.get(device or "")
        return with_job(replace(found, rank=rank, device=device, gpu=gpu), job)

    def _on(self, device: str) -> list[RankId]:
        return [name for name, rank in self.live().items() if rank.device == device]


def with_job(about: F, job: JobId | None) -> F:
    return about if job is None else replace(about, **job.fields())
