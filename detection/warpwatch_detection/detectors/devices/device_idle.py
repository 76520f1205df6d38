"""Detects a device that is in use but runs nothing."""

from __future__ import annotations

from dataclasses import dataclass

from warpwatch_detection.config import DeviceIdleConfig
from warpwatch_detection.detectors.devices.watch import (
    DeviceWatch,
    Symptom,
    Watched,
    series,
    utilization,
)
from warpwatch_detection.ranks import RankDevices
from warpwatch_telemetry.anomalies import Severity
from warpwatch_telemetry.records import DeviceReading

MEMORY_USED, MEMORY_TOTAL = series("memory_used_bytes"), series("memory_total_bytes")
BUSY_SECONDS = series("busy_seconds_total")
# A desktop or a monitor causes this utilization.
MAX_UTILIZATION = 0.02
# The contexts of processes that do nothing take less.
MIN_MEMORY_SHARE = 0.05


@dataclass(slots=True)
class IdleDevice(Watched):
    """A device. idle_since: its first idle reading. who: a rank on it. memory_share: in use."""

    idle_since: float = 0.0
    busy_s: float | None = None
    who: str = ""
    memory_share: float = 0.0


class DeviceIdle(DeviceWatch[IdleDevice]):
    kind = "device_idle"
    device_type = IdleDevice
    unknown = "the GPU reports neither its utilization nor who uses it"
    # A lone kernel does not count as work.
    clear_s = 10.0

    def __init__(self, config: DeviceIdleConfig, ranks: RankDevices) -> None:
        super().__init__()
        self._ranks = ranks
        self.hold_s = config.after_s

    def examine(self, device: IdleDevice, seen: DeviceReading) -> Symptom | None:
        metrics, now = seen.metrics, seen.time
        busy = utilization(metrics)
        if busy is None:
            return None
        busy = max(busy, self._counted(device, seen))
        used, total = metrics.get(MEMORY_USED), metrics.get(MEMORY_TOTAL)
        device.memory_share = used / total if used is not None and total else 0.0
        users = (f"rank {rank} of {job.name}" for job, rank in self._ranks.on(seen.device))
        device.who = next(users, "")
        in_use = bool(device.who) or device.memory_share >= MIN_MEMORY_SHARE
        if not in_use or busy > MAX_UTILIZATION:
            return Symptom(0.0, 0.0, None, self.hold_s)
        if not device.hysteresis.found:
            since = device.hysteresis.since
            device.idle_since = now if since is None else since
        return Symptom(1.0, now - device.idle_since, None, self.hold_s)

    def _counted(self, device: IdleDevice, seen: DeviceReading) -> float:
        """Return the busy share of the time since the last reading, by the driver's counter."""
        total_s = seen.metrics.get(BUSY_SECONDS)
        before_s, device.busy_s = device.busy_s, total_s
        passed_s = seen.time - device.seen
        if total_s is None or before_s is None or passed_s <= 0:
            return 0.0
        return (total_s - before_s) / passed_s

    def severity(self, device: IdleDevice) -> Severity:
        """Return "warning" only for a job: a model may wait for requests on purpose."""
        return "warning" if device.who else "info"

    def describe(self, device: IdleDevice) -> str:
        idle_s = device.hysteresis.value or 0.0
        user = device.who or "a process"
        what = f"{user} has {device.memory_share * 100:.0f} % of the GPU's memory"
        if not idle_s:
            return "the GPU is busy, or no one uses it"
        return f"nothing has run on the GPU for {idle_s / 60:.0f} min, while {what}"
