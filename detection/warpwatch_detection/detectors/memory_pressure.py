"""Detects a lack of memory: the allocator has to retry, or device or host are almost full."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from warpwatch_detection.detector import (
    NEVER,
    WARMUP_STEPS,
    Cleared,
    Detector,
    DetectorResult,
    DetectorStatus,
    Observation,
    Results,
    detail_number,
)
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import DeviceReading, End, RankEvent, RankSeen, Step

# Peaks within a step are normal: memory must be full for this long.
HOLD_S = 30.0
# The used share of the device's memory, and of the limit of control group or host: above these an
# allocation of usual size hardly fits.
DEVICE_SHARE, HOST_SHARE = 0.97, 0.95
# The anomaly is over if the share is this much below its limit.
RELEASE = 0.02
# If this part of the reserved memory is unused, the allocator can free it.
IDLE_RESERVE = 0.10
# After this time without a further retry, the retries no longer count.
RETRIES_PAST_S = 300.0
_USED = ("device_memory_used_bytes", ())
_TOTAL = ("device_memory_total_bytes", ())
_RESERVED = ("device_memory_reserved_bytes", ())


@dataclass(slots=True)
class Fullness:
    """A share of memory in use. since: when it rose above its limit; full: for long enough."""

    share: float = 0.0
    since: float | None = None
    full: bool = False

    def update(self, share: float, limit: float, now: float) -> None:
        self.share = share
        if share >= limit:
            self.since = now if self.since is None else self.since
            self.full = self.full or now - self.since >= HOLD_S
        else:
            self.since = None
            self.full = self.full and share >= limit - RELEASE


@dataclass(slots=True)
class RankPressure:
    """retries: the allocator's count; retried: those of this anomaly, the last at retried_time.

    in_use: the share of the reserved memory that was used at its peak.
    """

    steps: int = 0
    step: int | None = None
    device: str | None = None
    retries: float | None = None
    retried: float = 0.0
    retried_time: float | None = None
    in_use: float | None = None
    host: Fullness = field(default_factory=Fullness)


@dataclass(slots=True)
class JobPressure:
    ranks: dict[int, RankPressure] = field(default_factory=dict)
    found: bool = False


@dataclass(slots=True)
class MemoryPressureState:
    """The jobs, and the devices that ranks are on."""

    jobs: dict[JobId, JobPressure] = field(default_factory=dict)
    devices: dict[str, Fullness] = field(default_factory=dict)
    deadline: float = NEVER


@dataclass(frozen=True, slots=True)
class Shortage:
    rank: int
    value: float
    limit: float
    text: str


class MemoryPressure(Detector):
    """Opens one anomaly per job, with the rank if only one lacks memory."""

    kind = "memory_pressure"
    waits = True
    state: MemoryPressureState
    reads = (Step, RankSeen, RankEvent, DeviceReading, End)

    def __init__(self) -> None:
        self.state = MemoryPressureState()

    def observe(self, seen: Observation) -> Results:
        if isinstance(seen, Step):
            rank = self._rank(seen.job_id, seen.rank)
            rank.steps += 1
            rank.step = seen.step
        elif isinstance(seen, DeviceReading):
            return self._device(seen)
        elif isinstance(seen, RankSeen):
            self._rank(seen.job_id, seen.rank).device = seen.device
        elif isinstance(seen, RankEvent):
            return self._event(seen)
        elif isinstance(seen, End) and seen.rank is not None:
            return self._gone(seen.job_id, seen.rank, seen.time)
        return ()

    def expire(self, now: float) -> Results:
        results: list[DetectorResult] = []
        for name, job in self.state.jobs.items():
            for rank in job.ranks.values():
                if rank.retried_time is not None and _past_at(rank) <= now:
                    rank.retried, rank.retried_time = 0.0, None
            results += self._judge(name, job, now)
        self._schedule()
        return results

    def forget(self, job: JobId) -> None:
        self.state.jobs.pop(job, None)
        used = {rank.device for other in self.state.jobs.values() for rank in other.ranks.values()}
        for device in self.state.devices.keys() - used:
            del self.state.devices[device]
        self._schedule()

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            for rank_number, rank in job.ranks.items():
                shortages = list(self._shortages(rank_number, rank))
                full = self.state.devices.get(rank.device or "")
                said = [f"{rank.retries:.0f} allocation retries"] if rank.retries else []
                said += [f"device {full.share:.0%} in use"] if full is not None else []
                said += [f"host memory {rank.host.share:.0%} in use"] if rank.host.share else []
                yield DetectorStatus(
                    "found" if shortages else "fine" if said else "learning",
                    f"rank {rank_number}: {', '.join(said) or 'nothing is known of its memory'}",
                    **name.fields(),
                    rank=rank_number,
                    value=full.share if full else rank.host.share or None,
                    limit=DEVICE_SHARE if full else HOST_SHARE,
                )

    # --- what is seen ---

    def _rank(self, name: JobId, number: int) -> RankPressure:
        ranks = self.state.jobs.setdefault(name, JobPressure()).ranks
        return ranks.get(number) or ranks.setdefault(number, RankPressure())

    def _device(self, seen: DeviceReading) -> Results:
        used, total = seen.metrics.get(_USED), seen.metrics.get(_TOTAL)
        names = [
            name
            for name, job in self.state.jobs.items()
            if any(rank.device == seen.device for rank in job.ranks.values())
        ]
        usable = (total or 0.0) - seen.metrics.get(_RESERVED, 0.0)
        if used is None or usable <= 0 or not names:
            return ()
        full = self.state.devices.setdefault(seen.device, Fullness())
        full.update(used / usable, DEVICE_SHARE, seen.time)
        return [v for name in names for v in self._judge(name, self.state.jobs[name], seen.time)]

    def _event(self, seen: RankEvent) -> Results:
        if seen.event == "died":
            return self._gone(seen.job_id, seen.rank, seen.time)
        if seen.event not in ("memory", "process") or seen.job_id not in self.state.jobs:
            return ()
        rank = self._rank(seen.job_id, seen.rank)
        if seen.event == "memory":
            self._allocator(rank, seen)
        else:
            left, limit = (detail_number(seen, name) for name in ("available_bytes", "limit_bytes"))
            if left is not None and limit:
                share = 1.0 - left / limit
                rank.host.update(share, HOST_SHARE, seen.time)
        return self._judge(seen.job_id, self.state.jobs[seen.job_id], seen.time)

    def _allocator(self, rank: RankPressure, seen: RankEvent) -> None:
        peak = detail_number(seen, "peak_allocated_bytes")
        reserved = detail_number(seen, "reserved_bytes")
        rank.in_use = peak / reserved if peak is not None and reserved else None
        retries = detail_number(seen, "allocation_retries")
        if retries is None:
            return
        before, rank.retries = rank.retries, retries
        # A successor's count begins at 0; the first steps try out how much fits.
        if before is not None and retries > before and rank.steps > WARMUP_STEPS:
            rank.retried += retries - before
            rank.retried_time = seen.time
            self._schedule()

    def _gone(self, name: JobId, rank_number: int, now: float) -> Results:
        job = self.state.jobs.get(name)
        if job is None or job.ranks.pop(rank_number, None) is None:
            return ()
        self._schedule()
        return self._judge(name, job, now)

    # --- what it means ---

    def _schedule(self) -> None:
        jobs = self.state.jobs.values()
        times = (_past_at(rank) for job in jobs for rank in job.ranks.values())
        self.state.deadline = min(times, default=NEVER)

    def _judge(self, name: JobId, job: JobPressure, now: float) -> Results:
        shortages = [r for n, rank in job.ranks.items() for r in self._shortages(n, rank)]
        if not shortages:
            was, job.found = job.found, False
            return (Cleared(now, name),) if was else ()
        job.found = True
        first, ranks = shortages[0], {shortage.rank for shortage in shortages}
        more = f"; {len(ranks) - 1} more ranks alike" if len(ranks) > 1 else ""
        found = Detected(
            time=now,
            severity="warning",
            **name.fields(),
            rank=first.rank if len(ranks) == 1 else None,
            step=job.ranks[first.rank].step,
            value=first.value,
            baseline=first.limit,
            summary=first.text + more,
        )
        return (found,)

    def _shortages(self, rank_number: int, rank: RankPressure) -> Iterable[Shortage]:
        device = self.state.devices.get(rank.device or "")
        if rank.retried_time is not None:
            text = (
                f"rank {rank_number}'s allocator found no room {rank.retried:.0f} times, gave its "
                "cache back and tried again"
            )
            yield Shortage(rank_number, rank.retried, 0.0, text)
        # Unused reserved memory is freed as soon as it is needed.
        in_need = rank.in_use is None or rank.in_use >= 1.0 - IDLE_RESERVE
        if device is not None and device.full and in_need:
            text = f"the device of rank {rank_number} is {device.share:.0%} full"
            yield Shortage(rank_number, device.share, DEVICE_SHARE, text)
        if rank.host.full:
            text = f"host memory of rank {rank_number} is {rank.host.share:.0%} full"
            yield Shortage(rank_number, rank.host.share, HOST_SHARE, text)


def _past_at(rank: RankPressure) -> float:
    """Return when the allocator's retries no longer count."""
    return NEVER if rank.retried_time is None else rank.retried_time + RETRIES_PAST_S
