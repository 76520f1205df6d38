"""Detects memory that grows without end (memory_leak), and a lack of memory (memory_pressure).

Memory is that of the device and that of the process on its host.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from warpwatch_detection.detector import (
    WARMUP_STEPS,
    Cleared,
    Detector,
    DetectorStatus,
    Observation,
    Results,
    changed,
    detail_number,
    job_found,
    job_status,
    rank_names,
)
from warpwatch_detection.ranks import Exit, RankDevices, as_exit
from warpwatch_detection.signals.memory_growth import MIN_SHARE, WINDOW_BLOCKS, MemoryGrowth
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import DeviceReading, End, RankEvent, RankSeen, Step


class MemoryDetector(Detector):
    """Finds one fault per job, and names the rank if it is the only one."""

    def __init__(self, ranks: RankDevices) -> None:
        self._ranks = ranks

    @abstractmethod
    def evaluate(self, name: JobId, job: Any, now: float) -> Results: ...

    def leave(self, exit: Exit) -> Results:
        """Forget a rank, without which the job may be healthy."""
        job = self.state.jobs.get(exit.job_id)
        if job is None or exit.rank is None or job.ranks.pop(exit.rank, None) is None:
            return ()
        return self.evaluate(exit.job_id, job, exit.time)


_FREE = ("device_memory_free_bytes", ())
# The memory of the allocator on the device, and that of the process on its host.
DEVICE, HOST = "device", "host"


@dataclass(slots=True)
class LeakingRank:
    """The memory of one rank.

    growths: the growth of DEVICE and HOST memory. reusable_bytes: memory that the allocator has
    reserved but not allocated. host_left_bytes: free memory of its control group or host.
    """

    step: int
    growths: dict[str, MemoryGrowth] = field(default_factory=dict)
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
        super().__init__(ranks)
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
                for where, growth in rank.growths.items():
                    yield self._status(name, number, growth, where)

    def _step(self, seen: Step) -> Results:
        job = self.state.jobs.get(seen.job_id)
        if job is None:
            job = self.state.jobs[seen.job_id] = LeakingJob()
        rank = job.ranks.get(seen.rank)
        if rank is None or seen.step < rank.step:
            # A restart begins with an empty memory; a record that is late looks the same.
            rank = job.ranks[seen.rank] = LeakingRank(seen.step)
        rank.step = seen.step
        if seen.work_class and HOST in rank.growths:
            rank.growths[HOST].follows_load = True
        return self._add(seen, job, rank, DEVICE, seen.memory_allocated_bytes)

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
            return self._add(seen, job, rank, HOST, detail_number(seen, "anonymous_bytes"))
        return ()

    def _add(
        self, seen: Step | RankEvent, job: LeakingJob, rank: LeakingRank, where: str,
        used: float | None,
    ) -> Results:  # fmt: skip
        """Add a sample of one memory of a rank, if it is known."""
        if used is None:
            return ()
        growth = rank.growths.get(where)
        if growth is None:
            growth = rank.growths[where] = MemoryGrowth(rank.step, patient=where == HOST)
        left = self._left(seen.job_id, seen.rank, rank, where)
        has_block = growth.add(rank.step, seen.time, used, left, len(job.ranks))
        # While none grows, only the level that has a new block has to be evaluated.
        is_due = has_block and (job.found or growth.found is not None)
        return self.evaluate(seen.job_id, job, seen.time) if is_due else ()

    def _left(self, name: JobId, number: int, rank: LeakingRank, where: str) -> float | None:
        """Return the free memory of host, or of device and allocator; None if it is unknown."""
        if where == HOST:
            return rank.host_left_bytes
        free = self.state.device_left_bytes.get(self._ranks.device(name, number) or "")
        return None if free is None else free + rank.reusable_bytes

    def evaluate(self, name: JobId, job: LeakingJob, now: float) -> Results:
        for where in (DEVICE, HOST):
            growths = {n: r.growths[where] for n, r in job.ranks.items() if where in r.growths}
            if any(growth.found is not None for growth in growths.values()):
                # Peers are named too that will be found when their block ends a record later.
                leaking = {n: growth for n, growth in growths.items() if growth.suspected}
                job.found = True
                return self._found(name, job, leaking, where, now)
        was_found, job.found = job.found, False
        return changed(name, now, was_found, None)

    def _found(
        self, name: JobId, job: LeakingJob, leaking: dict[int, MemoryGrowth], where: str, now: float
    ) -> Results:
        trends = {number: growth.window.trend() for number, growth in leaking.items()}
        if not all(trend.limit for trend in trends.values()):
            # Growth that became faster begins with few points.
            return ()
        worst = max(trends, key=lambda number: trends[number].slope)
        window, slope = leaking[worst].window, trends[worst].slope
        lasts_s = []
        for number, trend in trends.items():
            left = self._left(name, number, job.ranks[number], where)
            if left is not None and trend.slope * trend.steps_per_s > 0:
                lasts_s.append(left / (trend.slope * trend.steps_per_s))
        begin = window.points[0].step if window.begin_step is None else window.begin_step
        s = "s" if len(leaking) == 1 else ""
        verb, what = ("allocate", "more") if where == DEVICE else ("take", "more host memory")
        text = f"{rank_names(leaking)} {verb}{s} {size(slope)} {what} each step since step {begin}"
        if lasts_s:
            text += f": out of memory in about {duration(min(lasts_s))}"
        rank, step = worst if len(leaking) == 1 else None, job.ranks[worst].step
        return (job_found(name, now, text, slope, 0.0, rank=rank, step=step, begin_step=begin),)

    def _status(self, name: JobId, rank: int, growth: MemoryGrowth, where: str) -> DetectorStatus:
        window, trend, exhaustion = growth.window, growth.window.trend(), growth.exhaustion
        text = f"{where} memory of rank {rank}"
        if trend.limit:
            text += (
                f" moves by {size(trend.slope)} a step, limit {size(trend.limit)} in every part of "
                f"{len(window.points)} blocks"
            )
        else:
            text += f": {len(growth.short.points)} of {WINDOW_BLOCKS} blocks are there"
        if exhaustion.points:
            text += f"; {exhaustion.share:.0%} of what was left is gone, limit {MIN_SHARE:.0%}"
        near = max(growth.short, exhaustion, key=lambda one: one.nearest)
        more = {"learns": not trend.limit, "baseline": 0.0, "rank": rank}
        known = near if trend.limit or near.nearest else None
        return job_status(name, growth.found, text, trend.slope, trend.limit, known, **more)


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
    retries: float | None = None
    retried: float = 0.0
    retried_time: float | None = None
    in_use: float | None = None
    host: Fullness = field(default_factory=Fullness)

    def allocator(self, seen: RankEvent) -> None:
        """Apply an event ``memory``."""
        peak = detail_number(seen, "peak_allocated_bytes")
        reserved = detail_number(seen, "reserved_bytes")
        self.in_use = peak / reserved if peak is not None and reserved else None
        retries = detail_number(seen, "allocation_retries")
        if retries is None:
            return
        before, self.retries = self.retries, retries
        # A successor's count begins at 0; the first steps try out how much fits.
        if before is not None and retries > before and self.steps > WARMUP_STEPS:
            self.retried += retries - before
            self.retried_time = seen.time


@dataclass(slots=True)
class JobPressure:
    ranks: dict[int, RankPressure] = field(default_factory=dict)
    found: bool = False


@dataclass(slots=True)
class MemoryPressureState:
    """The jobs, and the devices that ranks are on."""

    jobs: dict[JobId, JobPressure] = field(default_factory=dict)
    devices: dict[str, Fullness] = field(default_factory=dict)


# The value of a shortage of memory, its limit, and a text.
Shortage = tuple[float, float, str]


class MemoryPressure(MemoryDetector):
    kind = "memory_pressure"
    state: MemoryPressureState
    reads = (Step, RankSeen, RankEvent, DeviceReading, End)

    def __init__(self, ranks: RankDevices) -> None:
        super().__init__(ranks)
        self.state = MemoryPressureState()

    def observe(self, seen: Observation) -> Results:
        # Most records are steps.
        if isinstance(seen, Step):
            rank = self._rank(seen.job_id, seen.rank)
            rank.steps, rank.step = rank.steps + 1, seen.step
        elif isinstance(seen, DeviceReading):
            return self._device(seen)
        elif isinstance(seen, RankSeen):
            self._rank(seen.job_id, seen.rank)
        elif exit := as_exit(seen):
            return self.leave(exit)
        elif isinstance(seen, RankEvent):
            return self._event(seen)
        return ()

    def forget(self, job: JobId) -> None:
        self.state.jobs.pop(job, None)
        for device in [one for one in self.state.devices if not any(self._ranks.on(one))]:
            del self.state.devices[device]

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            for number, rank in job.ranks.items():
                full = self._fullness(name, number)
                said = [f"{rank.retries:.0f} allocation retries"] if rank.retries else []
                said += [f"device {full.share:.0%} in use"] if full is not None else []
                said += [f"host memory {rank.host.share:.0%} in use"] if rank.host.share else []
                is_short = self._shortage(name, number, rank) is not None
                text = f"rank {number}: {', '.join(said) or 'nothing is known of its memory'}"
                value = full.share if full else rank.host.share or None
                limit = DEVICE_SHARE if full else HOST_SHARE
                yield job_status(name, is_short, text, value, limit, learns=not said, rank=number)

    def _rank(self, name: JobId, number: int) -> RankPressure:
        ranks = self.state.jobs.setdefault(name, JobPressure()).ranks
        return ranks.get(number) or ranks.setdefault(number, RankPressure())

    def _fullness(self, name: JobId, rank: int) -> Fullness | None:
        return self.state.devices.get(self._ranks.device(name, rank) or "")

    def _device(self, seen: DeviceReading) -> Results:
        used, total = seen.metrics.get(_USED), seen.metrics.get(_TOTAL)
        usable = (total or 0.0) - seen.metrics.get(_RESERVED, 0.0)
        jobs = self.state.jobs
        names = dict.fromkeys(job for job, _ in self._ranks.on(seen.device) if job in jobs)
        if used is None or usable <= 0 or not names:
            return ()
        full = self.state.devices.setdefault(seen.device, Fullness())
        full.update(used / usable, DEVICE_SHARE, seen.time)
        return [one for name in names for one in self.evaluate(name, jobs[name], seen.time)]

    def _event(self, seen: RankEvent) -> Results:
        if seen.event not in ("memory", "process") or seen.job_id not in self.state.jobs:
            return ()
        rank = self._rank(seen.job_id, seen.rank)
        left, limit = (detail_number(seen, name) for name in ("available_bytes", "limit_bytes"))
        if seen.event == "memory":
            rank.allocator(seen)
        elif left is not None and limit:
            rank.host.update(1.0 - left / limit, HOST_SHARE, seen.time)
        return self.evaluate(seen.job_id, self.state.jobs[seen.job_id], seen.time)

    def evaluate(self, name: JobId, job: JobPressure, now: float) -> Results:
        short: dict[int, Shortage] = {}
        for number, rank in job.ranks.items():
            if rank.retried_time is not None and now - rank.retried_time >= RETRIES_PAST_S:
                rank.retried, rank.retried_time = 0.0, None
            if shortage := self._shortage(name, number, rank):
                short[number] = shortage
        was_found, job.found = job.found, bool(short)
        if not short:
            return (Cleared(now, name),) if was_found else ()
        (first, (value, limit, text)), *others = short.items()
        text += f"; {len(others)} more ranks alike" if others else ""
        named, step = None if others else first, job.ranks[first].step
        return (job_found(name, now, text, value, limit, rank=named, step=step),)

    def _shortage(self, name: JobId, number: int, rank: RankPressure) -> Shortage | None:
        if rank.retried_time is not None:
            text = (
                f"rank {number}'s allocator found no room {rank.retried:.0f} times, gave its cache "
                "back and tried again"
            )
            return rank.retried, 0.0, text
        device = self._fullness(name, number)
        # Unused reserved memory is freed as soon as it is needed.
        in_need = rank.in_use is None or rank.in_use >= 1.0 - IDLE_RESERVE
        if device is not None and device.full and in_need:
            text = f"the device of rank {number} is {device.share:.0%} full"
            return device.share, DEVICE_SHARE, text
        if rank.host.full:
            text = f"host memory of rank {number} is {rank.host.share:.0%} full"
            return rank.host.share, HOST_SHARE, text
        return None
