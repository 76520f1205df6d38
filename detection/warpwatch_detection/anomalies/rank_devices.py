"""Which ranks live, and on which device each of them runs."""

from __future__ import annotations

from dataclasses import dataclass, field

# A death is judged seconds later; the rank's device must still be known then.
DEPARTED_S = 600.0
MAX_DEPARTED = 4096


@dataclass(slots=True)
class LiveRank:
    """seen_time, step_time: of the newest RankSeen and Step; below them, nothing is news."""

    device: str | None = None
    seen_time: float = float("-inf")
    step_time: float = float("-inf")


@dataclass(slots=True)
class RankDevices:
    """Live ranks by job and number; jobs in the order in which they began.

    departed: where ranks ran that are gone, and when they went, in that order.
    """

    jobs: dict[str, dict[int, LiveRank]] = field(default_factory=dict)
    departed: dict[tuple[str, int], tuple[str, float]] = field(default_factory=dict)

    def device(self, job: str, rank: int) -> str | None:
        """Also of a rank that died a moment ago."""
        life = self.jobs.get(job, {}).get(rank)
        if life is not None:
            return life.device
        device, _ = self.departed.get((job, rank), (None, 0.0))
        return device

    def leave(self, job: str, rank: int, time: float) -> None:
        life = self.jobs.get(job, {}).pop(rank, None)
        if life is None or life.device is None:
            return
        self.departed.pop((job, rank), None)
        self.departed[job, rank] = (life.device, time)
        for name, (_, gone) in list(self.departed.items()):
            if time - gone <= DEPARTED_S and len(self.departed) <= MAX_DEPARTED:
                break
            del self.departed[name]

    def longest_silent(self) -> tuple[str, float]:
        """The job that has shown nothing for longest, and when it last did. There must be one."""
        heard = {
            job: max((max(life.seen_time, life.step_time) for life in ranks.values()), default=0.0)
            for job, ranks in self.jobs.items()
        }
        job = min(heard, key=lambda name: heard[name])
        return job, heard[job]

    def devices(self, job: str) -> set[str]:
        ranks = self.jobs.get(job, {})
        return {life.device for life in ranks.values() if life.device is not None}

    def jobs_on(self, device: str) -> set[str]:
        return {
            job
            for job, ranks in self.jobs.items()
            if any(life.device == device for life in ranks.values())
        }

    def occupant(self, device: str) -> tuple[str | None, int | None]:
        """The job and rank on the device; what is not the only one there is None."""
        there = [
            (job, rank)
            for job, ranks in self.jobs.items()
            for rank, life in ranks.items()
            if life.device == device
        ]
        jobs = {job for job, _ in there}
        return (
            there[0][0] if len(jobs) == 1 else None,
            there[0][1] if len(there) == 1 else None,
        )
