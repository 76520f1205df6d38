"""A device that is in use and on which nothing runs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from warpwatch_detection.config import DeviceIdleConfig
from warpwatch_detection.detector import NEVER, Observation, Results
from warpwatch_detection.detectors.devices.watch import (
    DeviceWatch,
    Symptom,
    Watched,
    series,
    utilization,
)
from warpwatch_telemetry.anomalies import Severity
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import DeviceReading, End, RankEvent, RankSeen

MEMORY_USED, MEMORY_TOTAL = series("memory_used_bytes"), series("memory_total_bytes")
BUSY_SECONDS = series("busy_seconds_total")
# A desktop or a monitor causes this much.
MAX_UTILIZATION = 0.02
# More than the contexts of processes that do nothing take.
MIN_MEMORY_SHARE = 0.05
# Jobs whose ranks are remembered.
MAX_JOBS = 256


@dataclass(slots=True)
class IdleDevice(Watched):
    """idle_since: the first idle reading; who: one that uses it; memory_share: in use."""

    idle_since: float = 0.0
    busy_s: float | None = None
    who: str = ""
    memory_share: float = 0.0


@dataclass(slots=True)
class IdleState:
    """``ranks``: by job, the device of each rank."""

    devices: dict[str, IdleDevice] = field(default_factory=dict)
    ranks: dict[JobId, dict[int, str]] = field(default_factory=dict)
    deadline: float = NEVER


class DeviceIdle(DeviceWatch[IdleDevice]):
    kind = "device_idle"
    device_type = IdleDevice
    reads = (DeviceReading, RankSeen, RankEvent, End)
    unknown = "the GPU reports neither its utilization nor who uses it"
    # A lone kernel does not count as work.
    clear_s = 10.0

    @property
    def state_form(self) -> Any:
        return IdleState

    def __init__(self, config: DeviceIdleConfig) -> None:
        super().__init__()
        self.state = IdleState()
        self.hold_s = config.after_s

    def observe(self, seen: Observation) -> Results:
        if isinstance(seen, RankSeen):
            self._join(seen)
        elif isinstance(seen, End):
            self._leave(seen.job_id, seen.rank)
        elif isinstance(seen, RankEvent):
            if seen.event == "died":
                self._leave(seen.job_id, seen.rank)
        else:
            return super().observe(seen)
        return ()

    def _join(self, seen: RankSeen) -> None:
        ranks: dict[JobId, dict[int, str]] = self.state.ranks
        if seen.device is None:
            return
        if seen.job_id not in ranks and len(ranks) >= MAX_JOBS:
            del ranks[next(iter(ranks))]
        ranks.setdefault(seen.job_id, {})[seen.rank] = seen.device

    def _leave(self, job: JobId, rank: int | None) -> None:
        ranks = self.state.ranks.get(job, {})
        ranks.pop(rank, None)
        if rank is None or not ranks:
            self.forget(job)

    def forget(self, job: JobId) -> None:
        self.state.ranks.pop(job, None)

    def _users(self, uuid: str) -> Iterator[str]:
        for job, ranks in self.state.ranks.items():
            for rank, device in ranks.items():
                if device == uuid:
                    yield f"rank {rank} of {job.name}"

    def examine(self, device: IdleDevice, seen: DeviceReading) -> Symptom | None:
        metrics, now = seen.metrics, seen.time
        busy = utilization(metrics)
        if busy is None:
            return None
        busy = max(busy, self._counted(device, seen))
        used, total = metrics.get(MEMORY_USED), metrics.get(MEMORY_TOTAL)
        device.memory_share = used / total if used is not None and total else 0.0
        device.who = next(self._users(seen.device), "")
        in_use = bool(device.who) or device.memory_share >= MIN_MEMORY_SHARE
        if not in_use or busy > MAX_UTILIZATION:
            return Symptom(0.0, 0.0, None, self.hold_s)
        if not device.hysteresis.found:
            since = device.hysteresis.since
            device.idle_since = now if since is None else since
        return Symptom(1.0, now - device.idle_since, None, self.hold_s)

    def _counted(self, device: IdleDevice, seen: DeviceReading) -> float:
        """The share of the time since the reading before that the driver saw it busy."""
        total_s = seen.metrics.get(BUSY_SECONDS)
        before_s, device.busy_s = device.busy_s, total_s
        passed_s = seen.time - device.seen
        if total_s is None or before_s is None or passed_s <= 0:
            return 0.0
        return (total_s - before_s) / passed_s

    def severity(self, device: IdleDevice) -> Severity:
        """A job that stands still costs; a model that waits for requests may be meant to."""
        return "warning" if device.who else "info"

    def describe(self, device: IdleDevice) -> str:
        idle_s = device.hysteresis.value or 0.0
        user = device.who or "a process"
        what = f"{user} has {device.memory_share * 100:.0f} % of the GPU's memory"
        if not idle_s:
            return "the GPU is busy, or no one uses it"
        return f"nothing has run on the GPU for {idle_s / 60:.0f} min, while {what}"
