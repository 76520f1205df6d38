"""Detects memory that grows without end (memory_leak), and a lack of memory (memory_pressure).

Memory is that of the device and that of the process on its host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

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
    rank_names,
)
from warpwatch_detection.ranks import Exit, RankDevices, as_exit
from warpwatch_detection.signals.memory_growth import MIN_SHARE, WINDOW_BLOCKS, MemoryGrowth, Trend
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import DeviceReading, End, RankEvent, RankSeen, Step


class MemoryDetector(Detector):
    """Finds one fault per job, and names the rank if it is the only one."""

    @abstractmethod
    def evaluate(self, name: JobId, job: Any, now: float) -> Results: ...

    def leave(self, exit: Exit) -> Results:
        """Forget a rank, without which the job may be healthy."""
        job = self.state.jobs.get(exit.job_id)
        if job is None or exit.rank is None or job.ranks.pop(exit.rank, None) is None:
            return ()
        return self.evaluate(exit.job_id, job, exit.time)


_FREE = ("device_memory_free_bytes", ())


@dataclass(slots=True)
class LeakingRank:
    """The memory of one rank.

    device_growth, host_growth: the growth of its allocator's memory and of its process.
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
    """The jobs. device_left_bytes: the free memory of each device in its newest reading."""

    jobs: dict[JobId, LeakingJob] = field(default_factory=dict)
    device_left_bytes: dict[str, float] = field(default_factory=dict)


class MemoryLeak(MemoryDetector):
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
        if exit := as_exit(seen):
            return self.leave(exit)
        if isinstance(seen, RankEvent):
            return self._event(seen)
        if isinstance(seen, DeviceReading) and self._ranks.jobs and _FREE in seen.metrics:
            self.state.device_left_bytes[seen.device] = seen.metrics[_FREE]
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

    def _step(self, seen: Step) -> Results:
        name, number = seen.job_id, seen.step
        job = self.state.jobs.get(name) or self.state.jobs.setdefault(name, LeakingJob())
        rank = job.ranks.get(seen.rank)
        if rank is None or number < rank.step:
            # A restart begins with an empty memory; a record that is late looks the same.
            rank = job.ranks[seen.rank] = LeakingRank(number)
        rank.step = number
        if seen.work_class and rank.host_growth is not None:
            rank.host_growth.follows_load = True
        if seen.memory_allocated_bytes is None:
            return ()
        if rank.device_growth is None:
            rank.device_growth = MemoryGrowth(number)
        used, left = seen.memory_allocated_bytes, self._device_left(name, seen.rank, rank)
        has_block = rank.device_growth.add(number, seen.time, used, left, len(job.ranks))
        return self._add_block(seen, job, rank.device_growth) if has_block else ()

    def _event(self, seen: RankEvent) -> Results:
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
                left, ranks = rank.host_left_bytes, len(job.ranks)
                if rank.host_growth.add(rank.step, seen.time, used, left, ranks):
                    return self._add_block(seen, job, rank.host_growth)
        return ()

    def _add_block(self, seen: Step | RankEvent, job: LeakingJob, growth: MemoryGrowth) -> Results:
        # While none grows, only the level that has a new block has to be evaluated.
        is_due = job.found or growth.found is not None
        return self.evaluate(seen.job_id, job, seen.time) if is_due else ()

    def evaluate(self, name: JobId, job: LeakingJob, now: float) -> Results:
        device = {r: m.device_growth for r, m in job.ranks.items() if m.device_growth is not None}
        host = {r: m.host_growth for r, m in job.ranks.items() if m.host_growth is not None}
        for growths, on_device in ((device, True), (host, False)):
            if any(growth.found is not None for growth in growths.values()):
                # Peers are named too that will be found when their block ends a record later.
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
            now,
            "warning",
            f"{_who(leaking, slope, on_device)} each step since step {begin}{end}",
            **name.fields(),
            rank=worst if len(leaking) == 1 else None,
            step=job.ranks[worst].step,
            begin_step=begin,
            value=slope,
            baseline=0.0,
        )

    def _lasts_s(
        self, name: JobId, job: LeakingJob, number: int, trend: Trend, on_device: bool
    ) -> float | None:
        """Return the seconds until memory is full at this pace; None if that is unknown."""
        rank = job.ranks[number]
        left = self._device_left(name, number, rank) if on_device else rank.host_left_bytes
        pace = trend.slope * trend.steps_per_s
        return None if left is None or pace <= 0 else left / pace

    def _device_left(self, name: JobId, number: int, rank: LeakingRank) -> float | None:
        """Return the free memory of the rank's device and of its allocator."""
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


def _who(leaking: Collection[int], slope: float, on_device: bool) -> str:
    who, s = rank_names(leaking), "s" if len(leaking) == 1 else ""
    if on_device:
        return f"{who} allocate{s} {size(slope)} more"
    return f"{who} take{s} {size(slope)} more host memory"


def size(n_bytes: float) -> str:
    """Return a size in decimal units with two digits, such as 12 MB."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(n_bytes) >= factor:
            return f"{float(f'{n_bytes / factor:.2g}'):g} {unit}"
    return f"{n_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Return a coarse duration, such as 2 h."""
    for unit, factor in (("d", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 1.5 * factor:
            return f"{seconds / factor:.0f} {unit}"
    return f"{seconds:.0f} s"


# --- lack of memory ---

# Peaks within a step are normal: memory must be full for this long.
HOLD_S = 30.0
# The used share of the device's memory, and of the limit of control group or host: above these an
# allocation of usual size hardly fits.
DEVICE_SHARE, HOST_SHARE = 0.97, 0.95
# The anomaly is over if the share is this much below its limit.
RELEASE = 0.02
# If this part of the reserved memory is unused, the allocator can free it.
IDLE_RESERVE = 0.10
# Retries count until this time after the last one.
RETRIES_PAST_S = 300.0
_USED = ("device_memory_used_bytes", ())
_TOTAL = ("device_memory_total_bytes", ())
_RESERVED = ("device_memory_reserved_bytes", ())


@dataclass(slots=True)
class Fullness:
    """A share of memory in use. since: when it rose above its limit. full: whether that lasts."""

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
    """The memory of one rank.

    steps: the number of steps; step: the newest one. retries: the allocator's count. retried: the
    retries of the present anomaly, the last one at retried_time. in_use: the share of the reserved
    memory that was used at its peak.
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


# The value of a shortage of memory, its limit, and a text.
Shortage = tuple[float, float, str]


class MemoryPressure(MemoryDetector):
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
        elif exit := as_exit(seen):
            return self.leave(exit)
        elif isinstance(seen, RankEvent):
            return self._event(seen)
        return ()

    def expire(self, now: float) -> Results:
        results: list[DetectorResult] = []
        for name, job in self.state.jobs.items():
            for rank in job.ranks.values():
                if rank.retried_time is not None and _past_at(rank) <= now:
                    rank.retried, rank.retried_time = 0.0, None
            results += self.evaluate(name, job, now)
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
            for number, rank in job.ranks.items():
                full = self.state.devices.get(rank.device or "")
                said = [f"{rank.retries:.0f} allocation retries"] if rank.retries else []
                said += [f"device {full.share:.0%} in use"] if full is not None else []
                said += [f"host memory {rank.host.share:.0%} in use"] if rank.host.share else []
                yield DetectorStatus(
                    "found" if self._shortages(number, rank) else "fine" if said else "learning",
                    f"rank {number}: {', '.join(said) or 'nothing is known of its memory'}",
                    **name.fields(),
                    rank=number,
                    value=full.share if full else rank.host.share or None,
                    limit=DEVICE_SHARE if full else HOST_SHARE,
                )

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
        return [v for name in names for v in self.evaluate(name, self.state.jobs[name], seen.time)]

    def _event(self, seen: RankEvent) -> Results:
        if seen.event not in ("memory", "process") or seen.job_id not in self.state.jobs:
            return ()
        rank = self._rank(seen.job_id, seen.rank)
        if seen.event == "memory":
            self._allocator(rank, seen)
        else:
            left, limit = (detail_number(seen, name) for name in ("available_bytes", "limit_bytes"))
            if left is not None and limit:
                rank.host.update(1.0 - left / limit, HOST_SHARE, seen.time)
        return self.evaluate(seen.job_id, self.state.jobs[seen.job_id], seen.time)

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

    def leave(self, exit: Exit) -> Results:
        results = super().leave(exit)
        self._schedule()
        return results

    def _schedule(self) -> None:
        jobs = self.state.jobs.values()
        times = (_past_at(rank) for job in jobs for rank in job.ranks.values())
        self.state.deadline = min(times, default=NEVER)

    def evaluate(self, name: JobId, job: JobPressure, now: float) -> Results:
        short = {n: some for n, rank in job.ranks.items() if (some := self._shortages(n, rank))}
        was, job.found = job.found, bool(short)
        if not short:
            return (Cleared(now, name),) if was else ()
        first = next(iter(short))
        value, limit, text = short[first][0]
        found = Detected(
            now,
            "warning",
            text + (f"; {len(short) - 1} more ranks alike" if len(short) > 1 else ""),
            **name.fields(),
            rank=first if len(short) == 1 else None,
            step=job.ranks[first].step,
            value=value,
            baseline=limit,
        )
        return (found,)

    def _shortages(self, number: int, rank: RankPressure) -> list[Shortage]:
        found: list[Shortage] = []
        device = self.state.devices.get(rank.device or "")
        if rank.retried_time is not None:
            text = (
                f"rank {number}'s allocator found no room {rank.retried:.0f} times, gave its cache "
                "back and tried again"
            )
            found.append((rank.retried, 0.0, text))
        # Unused reserved memory is freed as soon as it is needed.
        in_need = rank.in_use is None or rank.in_use >= 1.0 - IDLE_RESERVE
        if device is not None and device.full and in_need:
            text = f"the device of rank {number} is {device.share:.0%} full"
            found.append((device.share, DEVICE_SHARE, text))
        if rank.host.full:
            text = f"host memory of rank {number} is {rank.host.share:.0%} full"
            found.append((rank.host.share, HOST_SHARE, text))
        return found


def _past_at(rank: RankPressure) -> float:
    """Return when the allocator's retries no longer count."""
    return NEVER if rank.retried_time is None else rank.retried_time + RETRIES_PAST_S
