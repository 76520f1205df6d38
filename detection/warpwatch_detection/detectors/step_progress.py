"""Keeps the state of `hang`: steps, pauses, and the activity of processes and devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from warpwatch_detection.detector import NEVER, detail_number
from warpwatch_telemetry.records import DeviceReading, RankEvent, Step

# Older readings are ignored.
STALE_S = 10.0
# A process that only waits uses less processor time than this: watchdogs and heartbeat take less
# than 1 %, and readings are rounded to 0.01 s.
IDLE_CPU_RATIO = 0.02
CPU_ROUNDING_S = 0.01
# A process that only waits reads and writes less than this.
IDLE_IO_BYTES_PER_S = 20_000.0
# The utilization of an idle device, and the memory utilization of a device that only spins.
IDLE_DEVICE_RATIO = 0.02
# A kernel that spins in a collective keeps its device busy; this leaves a margin for rounding.
BUSY_RATIO = 0.95
# A device that only spins takes less than this part of its power in steps.
SPIN_POWER_RATIO = 0.6
# The weight of a new reading in a device's typical power in steps.
POWER_WEIGHT = 0.05

_UTILIZATION = ("device_utilization_ratio", ())
_MEMORY_UTILIZATION = ("device_memory_utilization_ratio", ())
_DRAM_ACTIVE = ("device_dram_active_ratio", ())
_POWER = ("device_power_watts", ())


@dataclass(slots=True)
class ProcessActivity:
    """The newest reading of a process.

    io_idle_since: when transfers stopped. idle_since: when processor time and transfers stopped.
    """

    time: float
    cpu_s: float
    io_bytes: float | None
    idle_since: float
    io_idle_since: float


@dataclass(slots=True)
class DeviceActivity:
    """The newest reading of a device.

    idle_since, spin_since: when it became idle, or began to spin only. power_w: its power in steps.
    """

    time: float = -NEVER
    idle_since: float | None = None
    spin_since: float | None = None
    power_w: float | None = None


# Since when process and device of a rank are idle, and since when the device only spins.
Idle = tuple[float, float]


def idle_since(
    process: ProcessActivity | None, device: DeviceActivity | None, now: float
) -> Idle | None:
    """Return since when a rank is idle; None if that is unknown. device: None without one."""
    if process is None or now - process.time > STALE_S:
        return None
    if device is None:
        return process.idle_since, now
    if now - device.time > STALE_S:
        return None
    idle = now if device.idle_since is None else device.idle_since
    spin = now if device.spin_since is None else device.spin_since
    return max(process.idle_since, idle), max(process.io_idle_since, spin)


def idle_rank(ranks: Mapping[int, Idle | None], now: float) -> int | None:
    """Return the only rank outside a collective while all of its peers wait in one."""
    before = now - STALE_S
    spinning = [rank for rank, idle in ranks.items() if idle is not None and idle[1] <= before]
    others = [rank for rank in ranks if rank not in spinning]
    if len(others) != 1 or not spinning:
        return None
    idle = ranks[others[0]]
    return others[0] if idle is not None and idle[0] <= before else None


def read_process(known: ProcessActivity | None, seen: RankEvent) -> ProcessActivity | None:
    """Return the process's state after an event ``process``; None without processor time."""
    now, cpu_s, io = seen.time, detail_number(seen, "cpu_s"), detail_number(seen, "io_bytes")
    if cpu_s is None:
        return None
    if known is None or not 0.0 <= now - known.time <= STALE_S:
        return ProcessActivity(now, cpu_s, io, now, now)
    elapsed_s = now - known.time
    # Unknown transfers count as some.
    moved = None if io is None or known.io_bytes is None else io - known.io_bytes
    is_quiet = moved is not None and 0.0 <= moved <= IDLE_IO_BYTES_PER_S * elapsed_s
    if seen.detail.get("disk_wait") is True or not is_quiet:
        known.io_idle_since = known.idle_since = now
    # If the sum fell, a process has exited, so the job was active.
    if not 0.0 <= cpu_s - known.cpu_s <= IDLE_CPU_RATIO * elapsed_s + CPU_ROUNDING_S:
        known.idle_since = now
    known.time, known.cpu_s, known.io_bytes = now, cpu_s, io
    return known


def read_device(known: DeviceActivity | None, seen: DeviceReading) -> DeviceActivity:
    """Return the device's state after a reading; without a utilization it counts as busy."""
    device = known if known is not None else DeviceActivity(seen.time)
    used, power_w = seen.metrics.get(_UTILIZATION), seen.metrics.get(_POWER)
    traffic = seen.metrics.get(_DRAM_ACTIVE, seen.metrics.get(_MEMORY_UTILIZATION))
    is_idle = used is not None and used <= IDLE_DEVICE_RATIO
    is_quiet = traffic is not None and traffic <= IDLE_DEVICE_RATIO
    is_weak = (
        power_w is not None
        and device.power_w is not None
        and power_w <= SPIN_POWER_RATIO * device.power_w
    )
    spins = used is not None and used >= BUSY_RATIO and is_quiet and is_weak
    fresh = seen.time - device.time <= STALE_S
    device.idle_since = _since(is_idle, device.idle_since if fresh else None, seen.time)
    device.spin_since = _since(spins, device.spin_since if fresh else None, seen.time)
    if power_w is not None and used is not None and not is_idle and not is_quiet:
        before = power_w if device.power_w is None else device.power_w
        device.power_w = before + POWER_WEIGHT * (power_w - before)
    device.time = seen.time
    return device


def _since(is_so: bool, since: float | None, now: float) -> float | None:
    return None if not is_so else now if since is None else since


# ``warmup_timeout_s`` holds for this many first steps of a rank.
WARMUP_STEPS = 5
# The job's step time is the median of this many newest steps.
RECENT_STEPS = 64


@dataclass(slots=True)
class StepTimes:
    """The number of steps, and at least RECENT_STEPS of the newest durations."""

    steps: int = 0
    durations_s: list[float] = field(default_factory=list)

    def add(self, duration_s: float) -> None:
        self.durations_s.append(duration_s)
        self.steps += 1
        if len(self.durations_s) >= 4 * RECENT_STEPS:
            self.durations_s = self.recent_s

    @property
    def recent_s(self) -> list[float]:
        return self.durations_s[-RECENT_STEPS:]


@dataclass(slots=True)
class RankProgress:
    """The progress of a rank.

    step: the newest step. time: the time of this step, or of a later sign that the rank trains.
    silent_since: when its heartbeat stopped. holds_gil: whether a call in C is the reason, which
    may be a long checkpoint.
    """

    time: float
    step: int
    silent_since: float | None = None
    holds_gil: bool = False

    @property
    def unresponsive_since(self) -> float | None:
        """The time from which its process certainly cannot continue, or None."""
        return None if self.holds_gil else self.silent_since


@dataclass(slots=True)
class HangEpisode:
    """A hang, and how the ranks continued after it.

    waits_for: the stuck ranks that have not continued; without any the hang is over.
    paused: the ranks without a step since the hang, with the time of their last step before it.
    longest_s: the longest pause of the other ranks.
    is_broken: whether the pause is not normal for the job, because a process did not respond or
    exited, or steps are missing.
    is_idle: whether the hang was found because the whole job was idle.
    """

    waits_for: set[int]
    paused: dict[int, float]
    longest_s: float = 0.0
    is_broken: bool = False
    is_idle: bool = False

    def forget(self, rank: int) -> None:
        self.waits_for.discard(rank)
        self.paused.pop(rank, None)
        self.is_broken = True


@dataclass(slots=True)
class JobProgress:
    """The progress of a job.

    episode: the newest hang, until all ranks have continued after it.
    longest_gap_s: the longest healthy pause without a step. longest_idle_s: the longest idle time
    after which the job continued by itself. longest_hang_s: the longest hang that ended by itself.
    quiet_until: the time before which silence is excused.
    check_time: when to check the job again.
    """

    ranks: dict[int, RankProgress] = field(default_factory=dict)
    times: StepTimes = field(default_factory=StepTimes)
    processes: dict[int, ProcessActivity] = field(default_factory=dict)
    episode: HangEpisode | None = None
    longest_gap_s: float = 0.0
    longest_idle_s: float = 0.0
    longest_hang_s: float = 0.0
    quiet_until: float = 0.0
    check_time: float = NEVER

    @property
    def hung(self) -> bool:
        return self.episode is not None and bool(self.episode.waits_for)

    @property
    def warms_up(self) -> bool:
        return self.times.steps <= WARMUP_STEPS * len(self.ranks)

    @property
    def last_time(self) -> float:
        """The time of the newest step of the rank that has waited for longest."""
        return min(rank.time for rank in self.ranks.values())

    @property
    def newest_time(self) -> float:
        return max(rank.time for rank in self.ranks.values())

    @property
    def quiet_since(self) -> float:
        """The start of the wait for a step that is not excused."""
        return max(self.last_time, self.quiet_until)

    @property
    def silent(self) -> dict[int, RankProgress]:
        """Ranks whose heartbeat is missing."""
        return {n: rank for n, rank in self.ranks.items() if rank.silent_since is not None}

    def add_step(self, seen: Step, rank: RankProgress, is_excused: bool) -> None:
        """Add a rank's step that is late or out of order, or its first step after a hang."""
        gap_s, is_next = seen.time - rank.time, seen.step == rank.step + 1
        if seen.step <= rank.step - RECENT_STEPS:
            # The program was started again: it compiles and warms up again.
            self.times = StepTimes()
        episode = self.episode
        is_first = episode is not None and seen.rank in episode.paused
        # If records are missing, the length of the pause is unknown. A pause that is excused, or
        # that was a hang, is not normal.
        if is_next and not (self.hung or is_first or is_excused):
            self.longest_gap_s = max(self.longest_gap_s, gap_s)
        if episode is not None:
            self._go_on(episode, seen, in_order=is_next and not is_excused)
            if episode.is_idle and episode.waits_for:
                self.longest_idle_s = max(self.longest_idle_s, gap_s)

    def _go_on(self, episode: HangEpisode, seen: Step, in_order: bool) -> None:
        """Learn the pause of a hang after which all ranks continued: the second one is normal."""
        begin = episode.paused.pop(seen.rank, None)
        if begin is None:
            return
        episode.is_broken = episode.is_broken or not in_order
        episode.longest_s = max(episode.longest_s, seen.time - begin)
        if not episode.paused and not episode.is_broken:
            habit_s = min(episode.longest_s, self.longest_hang_s)
            self.longest_gap_s = max(self.longest_gap_s, habit_s)
            self.longest_hang_s = max(self.longest_hang_s, episode.longest_s)

    def resume(self, number: int) -> bool:
        """Apply a step or heartbeat of a rank. Return whether that ends the hang."""
        rank, episode = self.ranks[number], self.episode
        rank.silent_since, rank.holds_gil = None, False
        if episode is None:
            return False
        was_hung = self.hung
        episode.waits_for.discard(number)
        if not episode.paused:
            self.episode = None
        return was_hung and not self.hung

    def forget(self, number: int) -> bool:
        """Forget a rank that has left. Return whether that ends the hang."""
        self.ranks.pop(number, None)
        self.processes.pop(number, None)
        was_hung = self.hung
        if self.episode is not None:
            self.episode.forget(number)
            if not self.episode.paused:
                self.episode = None
        return was_hung and not self.hung

    def hang(self, culprit: int | None, limit_s: float, now: float) -> None:
        """Start the episode of a hang, or replace it as more is known."""
        before = self.episode if self.hung else None
        # Clocks of nodes differ, so not all ranks have been silent for the whole limit yet.
        stuck = {number for number, rank in self.ranks.items() if rank.time + limit_s / 2 <= now}
        self.episode = HangEpisode(
            waits_for={culprit} if culprit is not None else stuck or set(self.ranks),
            paused={number: rank.time for number, rank in self.ranks.items()},
            is_broken=any(rank.unresponsive_since for rank in self.ranks.values())
            or (before is not None and before.is_broken),
            is_idle=before is not None and before.is_idle,
        )

    def culprit(self) -> int | None:
        """Return the only rank that does not respond, or that is behind all of its peers."""
        silent = list(self.silent)
        if silent:
            return silent[0] if len(silent) == 1 else None
        behind = min(rank.step for rank in self.ranks.values())
        last = [number for number, rank in self.ranks.items() if rank.step == behind]
        return last[0] if len(last) == 1 else None
