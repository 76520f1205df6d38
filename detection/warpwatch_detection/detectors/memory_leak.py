"""Detects memory that grows without end, of the device or of the process."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from warpwatch_detection.detector import (
    Cleared,
    Detector,
    DetectorStatus,
    Observation,
    Results,
    detail_number,
)
from warpwatch_detection.ranks import RankDevices
from warpwatch_detection.signals.memory_growth import MIN_SHARE, WINDOW_BLOCKS, MemoryGrowth, Trend
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import DeviceReading, End, RankEvent, Step

_FREE = ("device_memory_free_bytes", ())
_MAX_NAMED = 8


@dataclass(slots=True)
class LeakingRank:
    """device_growth: growth of its allocator's memory; host_growth: growth of its process.

    reusable_bytes: memory that the allocator has reserved but not allocated. host_left_bytes: free
    memory of its control group or host.
    """

    step: int
    device_growth: MemoryGrowth | None = None
    host_growth: MemoryGrowth | None = None
    reusable_bytes: float = 0.0
    host_left_bytes: float | None = None


@dataclass(slots=True)
class LeakingJob:
    ranks: dict[int, LeakingRank] = field(default_factory=dict)
    found: bool = False


@dataclass(slots=True)
class MemoryLeakState:
    """device_left_bytes: free memory of each device, by its newest reading."""

    jobs: dict[JobId, LeakingJob] = field(default_factory=dict)
    device_left_bytes: dict[str, float] = field(default_factory=dict)


class MemoryLeak(Detector):
    """Opens one anomaly per job, with the rank if only one leaks."""

    kind = "memory_leak"
    state_version = 2
    state: MemoryLeakState
    reads = (Step, RankEvent, DeviceReading, End)

    def __init__(self, ranks: RankDevices) -> None:
        self._ranks = ranks
        self.state = MemoryLeakState()

    def observe(self, seen: Observation) -> Results:
        if isinstance(seen, Step):
            return self._step(seen)
        elif isinstance(seen, DeviceReading):
            self._device(seen)
        elif isinstance(seen, RankEvent):
            return self._event(seen)
        elif isinstance(seen, End) and seen.rank is not None:
            return self._gone(seen.job_id, seen.rank, seen.time)
        return ()

    def forget(self, job: JobId) -> None:
        self.state.jobs.pop(job, None)
        if not self.state.jobs:
            self.state.device_left_bytes.clear()

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            for number, rank in job.ranks.items():
                if rank.device_growth is not None:
                    yield self._status(name, number, rank.device_growth, "device memory")
                if rank.host_growth is not None:
                    yield self._status(name, number, rank.host_growth, "host memory")

    # --- what is seen ---

    def _step(self, seen: Step) -> Results:
        name, number = seen.job_id, seen.step
        job = self.state.jobs.get(name) or self.state.jobs.setdefault(name, LeakingJob())
        rank = job.ranks.get(seen.rank)
        if rank is None or number < rank.step:
            # A restart begins with an empty memory; a record that is late looks the same.
            rank = job.ranks[seen.rank] = LeakingRank(number)
        rank.step = number
        if seen.memory_allocated_bytes is None:
            return ()
        if rank.device_growth is None:
            rank.device_growth = MemoryGrowth(number)
        used = seen.memory_allocated_bytes
        left = self._device_left(name, seen.rank, rank)
        return self._add(seen, job, rank.device_growth, used, left)

    def _device(self, seen: DeviceReading) -> None:
        free = seen.metrics.get(_FREE)
        if free is not None and self._ranks.jobs:
            self.state.device_left_bytes[seen.device] = free

    def _event(self, seen: RankEvent) -> Results:
        if seen.event == "died":
            return self._gone(seen.job_id, seen.rank, seen.time)
        job = self.state.jobs.get(seen.job_id)
        rank = None if job is None else job.ranks.get(seen.rank)
        if job is None or rank is None:
            return ()
        if seen.event == "memory":
            allocated = detail_number(seen, "allocated_bytes")
            reserved = detail_number(seen, "reserved_bytes")
            if allocated is not None and reserved is not None:
                rank.reusable_bytes = max(0.0, reserved - allocated)
        elif seen.event == "process":
            rank.host_left_bytes = detail_number(seen, "available_bytes")
            used = detail_number(seen, "anonymous_bytes")
            if used is not None:
                if rank.host_growth is None:
                    rank.host_growth = MemoryGrowth(rank.step, patient=True)
                return self._add(seen, job, rank.host_growth, used, rank.host_left_bytes)
        return ()

    def _add(
        self,
        seen: Step | RankEvent,
        job: LeakingJob,
        growth: MemoryGrowth,
        used: float,
        left: float | None,
    ) -> Results:
        step = job.ranks[seen.rank].step
        is_judged = growth.add(step, seen.time, used, left, len(job.ranks))
        # While none grows, only the level that has got a block has to be evaluated.
        if is_judged and (job.found or growth.found is not None):
            return self._judge(seen.job_id, job, seen.time)
        return ()

    def _gone(self, name: JobId, rank: int, now: float) -> Results:
        job = self.state.jobs.get(name)
        if job is None or job.ranks.pop(rank, None) is None:
            return ()
        return self._judge(name, job, now)

    # --- what it means ---

    def _judge(self, name: JobId, job: LeakingJob, now: float) -> Results:
        device = {r: m.device_growth for r, m in job.ranks.items() if m.device_growth is not None}
        host = {r: m.host_growth for r, m in job.ranks.items() if m.host_growth is not None}
        for growths, on_device in ((device, True), (host, False)):
            if any(growth.found is not None for growth in growths.values()):
                # Peers that are about to be found as well: their block ends a record later.
                leaking = {r: growth for r, growth in growths.items() if growth.suspected}
                job.found = True
                return (self._found(name, job, leaking, on_device, now),)
        if job.found:
            job.found = False
            return (Cleared(now, name),)
        return ()

    def _found(
        self,
        name: JobId,
        job: LeakingJob,
        leaking: dict[int, MemoryGrowth],
        on_device: bool,
        now: float,
    ) -> Detected:
        trends = {rank: growth.window.trend() for rank, growth in leaking.items()}
        worst = max(trends, key=lambda rank: trends[rank].slope)
        window, slope = leaking[worst].window, trends[worst].slope
        left = [self._lasts_s(name, job, n, trend, on_device) for n, trend in trends.items()]
        lasts_s = min((seconds for seconds in left if seconds is not None), default=None)
        begin = window.points[0].step if window.begin_step is None else window.begin_step
        end = "" if lasts_s is None else f": out of memory in about {duration(lasts_s)}"
        return Detected(
            time=now,
            severity="warning",
            **name.fields(),
            rank=worst if len(leaking) == 1 else None,
            step=job.ranks[worst].step,
            begin_step=begin,
            value=slope,
            baseline=0.0,
            summary=f"{_who(leaking, slope, on_device)} each step since step {begin}{end}",
        )

    def _lasts_s(
        self, name: JobId, job: LeakingJob, number: int, trend: Trend, on_device: bool
    ) -> float | None:
        """Seconds until it is full at this pace; None where it is not known how much is left."""
        rank = job.ranks[number]
        left = self._device_left(name, number, rank) if on_device else rank.host_left_bytes
        pace = trend.slope * trend.steps_per_s
        return None if left is None or pace <= 0 else left / pace

    def _device_left(self, name: JobId, number: int, rank: LeakingRank) -> float | None:
        """Return free memory of the rank's device and what its allocator keeps for itself."""
        free = self.state.device_left_bytes.get(self._ranks.device(name, number) or "")
        return None if free is None else free + rank.reusable_bytes

    def _status(self, name: JobId, rank: int, growth: MemoryGrowth, of: str) -> DetectorStatus:
        window, known = growth.window, len(growth.short.points)
        trend, exhaustion = window.trend(), growth.exhaustion
        text = f"{of} of rank {rank}: {known} of {WINDOW_BLOCKS} blocks are there"
        if trend.limit:
            text = (
                f"{of} of rank {rank} moves by {size(trend.slope)} a step, limit "
                f"{size(trend.limit)} in every part of {len(window.points)} blocks"
            )
        if exhaustion.points:
            text += f"; {exhaustion.share:.0%} of what was left is gone, limit {MIN_SHARE:.0%}"
        came = [(one.nearest or 0.0, one.nearest_step) for one in (growth.short, exhaustion)]
        nearest, nearest_step = max(came, key=lambda one: one[0])
        return DetectorStatus(
            "found" if growth.found else "fine" if trend.limit else "learning",
            text,
            **name.fields(),
            rank=rank,
            value=trend.slope,
            baseline=0.0,
            limit=trend.limit,
            nearest=None if nearest_step is None else nearest,
            nearest_step=nearest_step,
        )


def _who(leaking: Iterable[int], slope: float, on_device: bool) -> str:
    ranks = sorted(leaking)
    one = len(ranks) == 1
    who = f"rank {ranks[0]}" if one else f"ranks {', '.join(map(str, ranks[:_MAX_NAMED]))}"
    if on_device:
        return f"{who} {'allocates' if one else 'allocate'} {size(slope)} more"
    return f"{who} {'takes' if one else 'take'} {size(slope)} more host memory"


def size(n_bytes: float) -> str:
    """Decimal, two digits: 12 MB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n_bytes) >= factor:
            return f"{float(f'{n_bytes / factor:.2g}'):g} {unit}"
    return f"{n_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Coarse, as a forecast is: 2 h."""
    for unit, factor in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * factor:
            return f"{seconds / factor:.0f} {unit}"
    return f"{seconds:.0f} s"
