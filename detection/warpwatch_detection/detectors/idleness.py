"""Whether anything of a job moves: its ranks' processes and the devices that they are on.

A rank does nothing in one of two ways, and only these are believed:

- its process is idle (no processor time, nothing read or written, no system call that waits for a
  disk) and its device does not work;
- its device spins in a collective (busy all the time, its memory idle, its power far below that of
  a step) and its process reads and writes nothing. Whatever the processor does: it waits.

A checkpoint writes and an evaluation computes, on some rank. So all ranks of the job must be seen
here, and what cannot be seen counts as moving.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from warpwatch_detection.detector import detail_number
from warpwatch_telemetry.records import DeviceReading, RankEvent

# Older readings say nothing of now.
STALE_S = 10.0
# Processor time a second of a process that only waits: its watchdogs and heartbeat take less than
# 1 %. A process list that is read every 2 s rounds to a hundredth of a second.
IDLE_CPU_RATIO = 0.02
CPU_ROUNDING_S = 0.01
# What such a process reads and writes meanwhile.
IDLE_IO_BYTES_PER_S = 20_000.0
# Utilization of a device that does nothing, and the use of memory of one that only spins.
IDLE_DEVICE_RATIO = 0.02
# A kernel that spins in a collective keeps its device busy; with a margin for rounding.
BUSY_RATIO = 0.95
# Power of a device that only spins against the power in its steps.
SPIN_POWER_RATIO = 0.6
# How fast the typical power of a device follows its readings in steps.
POWER_WEIGHT = 0.05

_UTILIZATION = ("device_utilization_ratio", ())
_MEMORY_UTILIZATION = ("device_memory_utilization_ratio", ())
_DRAM_ACTIVE = ("device_dram_active_ratio", ())
_POWER = ("device_power_watts", ())


@dataclass(slots=True)
class ProcessActivity:
    """idle_since: neither processor time nor transfers; io_idle_since: no transfers."""

    time: float
    cpu_s: float
    io_bytes: float | None
    idle_since: float
    io_idle_since: float


@dataclass(slots=True)
class DeviceActivity:
    """idle_since: it does not work; spin_since: it only spins. power_w: typical when it works."""

    time: float
    idle_since: float | None = None
    spin_since: float | None = None
    power_w: float | None = None


@dataclass(slots=True)
class JobActivity:
    """``devices``: of each rank, by UUID."""

    world_size: int = 1
    processes: dict[int, ProcessActivity] = field(default_factory=dict)
    devices: dict[int, str] = field(default_factory=dict)

    def process(self, seen: RankEvent) -> None:
        """An event ``process``; one without processor time says nothing."""
        cpu_s, io = detail_number(seen, "cpu_s"), detail_number(seen, "io_bytes")
        if cpu_s is None:
            self.processes.pop(seen.rank, None)
            return
        now, known = seen.time, self.processes.get(seen.rank)
        if known is None or not 0.0 <= now - known.time <= STALE_S:
            self.processes[seen.rank] = ProcessActivity(now, cpu_s, io, now, now)
            return
        elapsed_s = now - known.time
        if seen.detail.get("disk_wait") is True or _transfers(known.io_bytes, io, elapsed_s):
            known.io_idle_since = known.idle_since = now
        # A sum that fell lost a process: something happened.
        if not 0.0 <= cpu_s - known.cpu_s <= IDLE_CPU_RATIO * elapsed_s + CPU_ROUNDING_S:
            known.idle_since = now
        known.time, known.cpu_s, known.io_bytes = now, cpu_s, io

    def forget(self, rank: int) -> None:
        self.processes.pop(rank, None)
        self.devices.pop(rank, None)

    def idle_since(
        self, ranks: Collection[int], devices: Mapping[str, DeviceActivity], now: float
    ) -> float | None:
        """Since when nothing of the job moves; None: something does, or it cannot be seen."""
        known = [self._rank(rank, devices, now) for rank in ranks]
        seen = [pair for pair in known if pair is not None]
        if len(ranks) < self.world_size or len(seen) < len(known):
            return None
        return max(min(pair) for pair in seen)

    def rank_idle_since(
        self, rank: int, devices: Mapping[str, DeviceActivity], now: float
    ) -> float | None:
        """Since when the rank does nothing and does not wait in a collective either."""
        known = self._rank(rank, devices, now)
        return None if known is None else known[0]

    def idle_rank(
        self, ranks: Collection[int], devices: Mapping[str, DeviceActivity], now: float
    ) -> int | None:
        """The one rank that is in no collective while all of its peers wait in one."""
        before = now - STALE_S
        known = {rank: self._rank(rank, devices, now) or (now, now) for rank in ranks}
        spinning = {rank for rank, (_, spins) in known.items() if spins <= before}
        idle = [rank for rank in known.keys() - spinning if known[rank][0] <= before]
        if len(idle) == 1 and spinning and len(spinning) == len(ranks) - 1:
            return idle[0]
        return None

    def _rank(
        self, rank: int, devices: Mapping[str, DeviceActivity], now: float
    ) -> tuple[float, float] | None:
        """Since when process and device do nothing, and since when the device only spins."""
        process, name = self.processes.get(rank), self.devices.get(rank)
        if process is None or now - process.time > STALE_S:
            return None
        if name is None:
            return process.idle_since, now
        device = devices.get(name)
        if device is None or now - device.time > STALE_S:
            return None
        idle = now if device.idle_since is None else device.idle_since
        spin = now if device.spin_since is None else device.spin_since
        return max(process.idle_since, idle), max(process.io_idle_since, spin)


def _transfers(before: float | None, now: float | None, elapsed_s: float) -> bool:
    """Unknown counts as yes."""
    if before is None or now is None:
        return True
    return not 0.0 <= now - before <= IDLE_IO_BYTES_PER_S * elapsed_s


def read_device(known: DeviceActivity | None, seen: DeviceReading) -> DeviceActivity:
    """What a reading says of a device; one without utilization counts as working."""
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
