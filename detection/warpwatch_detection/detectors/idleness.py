"""Whether anything of a job moves: its ranks' processes and the devices that they are on.

A rank does nothing in one of two ways, and only these are believed:

- its process is at rest (no processor time, nothing read or written, nobody in a system call that
  waits for a disk) and its device does not work;
- its device spins in a collective (busy all the time, its memory idle, its power far below that of
  a step) and its process reads and writes nothing. Whatever the processor does: it waits.

A checkpoint writes and an evaluation computes, on some rank. So all ranks of the job must be seen
here, and what cannot be seen counts as moving.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from warpwatch_detection.config_life import HangConfig
from warpwatch_detection.detectors.event_numbers import detail_number
from warpwatch_telemetry.records import DeviceReading, RankEvent

# Older activity say nothing of now.
STALE_S = 10.0
# A kernel that spins in a collective keeps its device busy; with a margin for rounding.
BUSY_RATIO = 0.95
# How fast the typical power of a device follows its statuses in steps.
_POWER_WEIGHT = 0.05

_UTILIZATION = ("device_utilization_ratio", ())
_MEMORY_UTILIZATION = ("device_memory_utilization_ratio", ())
_DRAM_ACTIVE = ("device_dram_active_ratio", ())
_POWER = ("device_power_watts", ())


@dataclass(slots=True)
class ProcessActivity:
    """rest_since: neither processor time nor transfers; still_since: no transfers."""

    time: float
    cpu_s: float
    io_bytes: float | None
    rest_since: float
    still_since: float


@dataclass(slots=True)
class DeviceActivity:
    """idle_since: it does not work; spin_since: it only spins. power_w: typical when it works."""

    time: float
    idle_since: float | None = None
    spin_since: float | None = None
    power_w: float | None = None


@dataclass(slots=True)
class JobActivity:
    world_size: int = 1
    processes: dict[int, ProcessActivity] = field(default_factory=dict)
    devices: dict[int, str] = field(default_factory=dict)

    def process(self, seen: RankEvent, config: HangConfig) -> None:
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
        if self._transfers(known, io, elapsed_s, config) or seen.detail.get("disk_wait") is True:
            known.still_since = known.rest_since = now
        # A sum that fell lost a process: something happened.
        if not 0.0 <= cpu_s - known.cpu_s <= config.rest_cpu_ratio * elapsed_s + 0.01:
            known.rest_since = now
        known.time, known.cpu_s, known.io_bytes = now, cpu_s, io

    @staticmethod
    def _transfers(
        known: ProcessActivity, io: float | None, elapsed_s: float, config: HangConfig
    ) -> bool:
        """Unknown is taken for yes."""
        if io is None or known.io_bytes is None:
            return True
        return not 0.0 <= io - known.io_bytes <= config.rest_io_bytes_per_s * elapsed_s

    def gone(self, rank: int) -> None:
        self.processes.pop(rank, None)
        self.devices.pop(rank, None)

    def rest_since(
        self, ranks: Collection[int], devices: Mapping[str, DeviceActivity], now: float
    ) -> float | None:
        """Since when nothing of the job moves; None: something does, or it cannot be seen."""
        rests = [self._rank(rank, devices, now) for rank in ranks]
        if len(ranks) < self.world_size or None in rests:
            return None
        return max(min(rest) for rest in rests if rest is not None)

    def rank_rest_since(
        self, rank: int, devices: Mapping[str, DeviceActivity], now: float
    ) -> float | None:
        """Since when the rank does nothing and does not wait in a collective either."""
        rest = self._rank(rank, devices, now)
        return None if rest is None else rest[0]

    def idle_rank(
        self, ranks: Collection[int], devices: Mapping[str, DeviceActivity], now: float
    ) -> int | None:
        """The one rank that is in no collective while all of its peers wait in one."""
        before = now - STALE_S
        rests = {rank: self._rank(rank, devices, now) or (now, now) for rank in ranks}
        peers = {rank for rank, (_, spins) in rests.items() if spins <= before}
        idle = [rank for rank in rests.keys() - peers if rests[rank][0] <= before]
        return idle[0] if len(idle) == 1 and peers and len(peers) == len(ranks) - 1 else None

    def _rank(
        self, rank: int, devices: Mapping[str, DeviceActivity], now: float
    ) -> tuple[float, float] | None:
        """Since when process and device do nothing, and since when the device only spins."""
        process, name = self.processes.get(rank), self.devices.get(rank)
        if process is None or now - process.time > STALE_S:
            return None
        if name is None:
            return process.rest_since, now
        device = devices.get(name)
        if device is None or now - device.time > STALE_S:
            return None
        idle = now if device.idle_since is None else device.idle_since
        spin = now if device.spin_since is None else device.spin_since
        return max(process.rest_since, idle), max(process.still_since, spin)


def read_device(
    known: DeviceActivity | None, seen: DeviceReading, config: HangConfig
) -> DeviceActivity:
    """What a reading says of a device; one without utilization is taken for at work."""
    device = known if known is not None else DeviceActivity(seen.time)
    used, power_w = seen.metrics.get(_UTILIZATION), seen.metrics.get(_POWER)
    traffic = seen.metrics.get(_DRAM_ACTIVE, seen.metrics.get(_MEMORY_UTILIZATION))
    idle = used is not None and used <= config.rest_device_ratio
    quiet = traffic is not None and traffic <= config.rest_device_ratio
    weak = (
        power_w is not None
        and device.power_w is not None
        and power_w <= config.spin_power_ratio * device.power_w
    )
    spins = used is not None and used >= BUSY_RATIO and quiet and weak
    fresh = seen.time - device.time <= STALE_S
    device.idle_since = _since(idle, device.idle_since if fresh else None, seen.time)
    device.spin_since = _since(spins, device.spin_since if fresh else None, seen.time)
    if power_w is not None and used is not None and not idle and not quiet:
        before = power_w if device.power_w is None else device.power_w
        device.power_w = before + _POWER_WEIGHT * (power_w - before)
    device.time = seen.time
    return device


def _since(is_so: bool, since: float | None, now: float) -> float | None:
    return None if not is_so else now if since is None else since
