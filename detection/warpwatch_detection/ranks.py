"""Tracks which ranks live, and on which device each of them runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeVar

from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.newest import put_newest
from warpwatch_telemetry.records import DeviceReading, End, RankEvent, RankSeen, Step

MAX_JOBS = 256
# If there are too many jobs, a job that was silent for this long is dropped for another.
SILENT_S = 600.0
# A death is evaluated seconds later, when the rank's device must still be known.
DEPARTED_S = 600.0
MAX_DEPARTED = 4096
# GPUs that are divided again have new UUIDs each time.
MAX_INDICES = 1024

RankId = tuple[JobId, int]
Exit = End | RankEvent
F = TypeVar("F", bound=Detected)


@dataclass(slots=True)
class LiveRank:
    """A live rank: its newest step, and the times of its newest RankSeen and Step.

    serves: whether it is a process of an inference server.
    """

    device: str | None = None
    serves: bool = False
    world_size: int = 1
    step: int = -1
    seen_time: float = float("-inf")
    step_time: float = float("-inf")


@dataclass(slots=True)
class RankDevices:
    """The live ranks by job and number; jobs in the order in which they started.

    departed: device and end time of ranks that ended, in the order of their end.
    indices: the newest indices of GPUs, by UUID.
    """

    jobs: dict[JobId, dict[int, LiveRank]] = field(default_factory=dict)
    departed: dict[RankId, tuple[str, float]] = field(default_factory=dict)
    indices: dict[str, int] = field(default_factory=dict)

    def add(self, record: Step | RankSeen) -> bool:
        """Apply a step or report of a rank; return False if its job is one too many."""
        rank = self.find(record.job_id, record.rank)
        if rank is None:
            if record.job_id not in self.jobs and len(self.jobs) >= MAX_JOBS:
                return False
            rank = self.jobs.setdefault(record.job_id, {})[record.rank] = LiveRank()
        if isinstance(record, Step):
            rank.step_time, rank.step = record.time, record.step
        else:
            rank.device = record.device or rank.device
            rank.world_size = record.world_size
            rank.serves = record.kind == "serve"
            rank.seen_time = record.time
        return True

    def index(self, reading: DeviceReading) -> None:
        if reading.index is not None and self.indices.get(reading.device) != reading.index:
            put_newest(self.indices, reading.device, reading.index, MAX_INDICES)

    def ends_with(self, exit: Exit) -> bool:
        """Return whether no rank of the job is left after the exit."""
        return self.jobs.get(exit.job_id, {}).keys() == {exit.rank}

    def leave(self, exit: Exit) -> bool:
        """Remove a rank that ended or died. Return whether the job has no rank left."""
        ranks = self.jobs.get(exit.job_id)
        if ranks is not None and exit.rank is not None:
            self._remove(exit.job_id, exit.rank, exit.time)
        return ranks is not None and (exit.rank is None or not ranks)

    def _remove(self, job: JobId, rank: int, time: float) -> None:
        left = self.jobs[job].pop(rank, None)
        if left is None or left.device is None:
            return
        self.departed.pop((job, rank), None)
        self.departed[job, rank] = (left.device, time)
        for name, (_, ended) in list(self.departed.items()):
            if time - ended <= DEPARTED_S and len(self.departed) <= MAX_DEPARTED:
                break
            del self.departed[name]

    def find(self, job: JobId, rank: int) -> LiveRank | None:
        try:
            return self.jobs[job][rank]
        except KeyError:
            return None

    def spans_nodes(self, job: JobId) -> bool:
        """Return whether the job has ranks that are not followed here; a fleet follows all."""
        return len(self.jobs.get(job, {})) < self.world_size(job)

    def world_size(self, job: JobId) -> int:
        return max((rank.world_size for rank in self.jobs.get(job, {}).values()), default=0)

    def longest_silent(self, owner: str | None = None) -> tuple[JobId, float]:
        """Return the job that is silent for longest, and its last time. There must be a job.

        owner: considers only the jobs of this owner.
        """
        last = {
            job: max((max(rank.seen_time, rank.step_time) for rank in ranks.values()), default=0.0)
            for job, ranks in self.jobs.items()
            if owner in (None, job.owner)
        }
        job = min(last, key=lambda name: last[name])
        return job, last[job]

    def device(self, job: JobId, rank: int) -> str | None:
        """Return the device of a rank, even if the rank has just died."""
        live = self.find(job, rank)
        if live is not None:
            return live.device
        device, _ = self.departed.get((job, rank), (None, 0.0))
        return device

    def newest_step(self, job: JobId | None) -> int:
        """Return the newest step of any rank, or -1."""
        ranks = self.jobs.get(job, {}) if job is not None else {}
        return max((rank.step for rank in ranks.values()), default=-1)

    def devices(self, job: JobId) -> set[str]:
        ranks = self.jobs.get(job, {})
        return {rank.device for rank in ranks.values() if rank.device is not None}

    def located(self, found: Detected) -> Detected:
        """Return the finding with its device's job and rank, or its rank's device, and its index.

        A job or rank that is not the only one on the device is not named.
        """
        job, rank, device = found.job_id, found.rank, found.device
        if job is None and device is not None:
            there = list(self.on(device))
            job = there[0][0] if len({job for job, _ in there}) == 1 else None
            rank = there[0][1] if len(there) == 1 else None
        elif job is not None and rank is not None and device is None:
            device = self.device(job, rank)
        gpu = self.indices.get(device or "")
        return with_job(replace(found, rank=rank, device=device, gpu=gpu), job)

    def on(self, device: str) -> Iterator[RankId]:
        for job, ranks in self.jobs.items():
            yield from ((job, n) for n, rank in ranks.items() if rank.device == device)

    def restore(self, saved: RankDevices) -> None:
        """Adopt saved ranks in this object, which others hold too."""
        self.jobs, self.departed, self.indices = saved.jobs, saved.departed, saved.indices


class JobLimit:
    """Decides which job is dropped if there are too many.

    dropped: the number of jobs that were refused, or forgotten before their end.
    """

    def __init__(self) -> None:
        self.dropped = 0
        # Jobs that were refused, and until when no job can be dropped for another.
        self._refused: set[JobId] = set()
        self._full_until = float("-inf")

    def victim(self, ranks: RankDevices, record: Step | RankSeen) -> JobId | None:
        """Return the job to forget so that the record's rank can be added; None to refuse it.

        If another owner has more jobs, it is the owner's longest silent job. Else it is a silent
        job: a live one would return and displace the next.
        """
        owners = Counter(job.owner for job in ranks.jobs)
        greediest, most = owners.most_common(1)[0]
        if owners[record.owner] + 1 < most:
            self.dropped += 1
            return ranks.longest_silent(greediest)[0]
        if record.time >= self._full_until:
            job, last_time = ranks.longest_silent()
            if record.time >= last_time + SILENT_S:
                self.dropped += 1
                self._refused.discard(record.job_id)
                return job
            self._full_until = last_time + SILENT_S
        if record.job_id not in self._refused and len(self._refused) < MAX_JOBS:
            self._refused.add(record.job_id)
            self.dropped += 1
        return None


def as_exit(record: object) -> Exit | None:
    """Return the record if a rank or job ends or dies with it."""
    if isinstance(record, RankEvent):
        return record if record.event == "died" else None
    return record if isinstance(record, End) else None


def with_job(about: F, job: JobId | None) -> F:
    return about if job is None else replace(about, **job.fields())
