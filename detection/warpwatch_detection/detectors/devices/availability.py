"""Finds devices that are lost, silent, stuck, idle although in use, or in need of service.

A GPU needs a reset, a reboot or a replacement if the driver asks for it or an XID requires it. It
was serviced if the driver no longer asks, node or driver were restarted, or the count of errors
fell. Only then can it be healthy again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from warpwatch_detection.config import DeviceIdleConfig
from warpwatch_detection.detector import NEVER, Cleared, DetectorResult, DetectorStatus, Results
from warpwatch_detection.detectors.devices.watch import (
    DeviceDetector,
    DeviceWatch,
    Symptom,
    Watched,
    series,
    utilization,
)
from warpwatch_detection.ranks import RankDevices
from warpwatch_telemetry.anomalies import Detected, Severity
from warpwatch_telemetry.records import DeviceReading
from warpwatch_telemetry.xids import XIDS, explain

# The reasons that the sources publish for a lost device.
LOST = {
    "lost": "does not answer any more: it has fallen off the bus or the driver does not list it",
    "reset_required": "does not work until it is reset",
}
# With these reasons the device is present. Another kind reports it, or it is not a fault.
PRESENT = ("stuck", "no_permission")
# The UUIDs of parts of GPUs, which may be removed, and of indices whose UUID was never read.
NO_GPUS = ("MIG-", "unknown-")
# The driver must report a loss twice, as one reading may be wrong.
TWICE_S = 2.0
# Longer than a driver takes to initialise a GPU (up to 32 s were measured).
SILENT_S = 45.0
# A GPU without readings may have been removed on purpose, so after a day it is no longer expected.
FORGET_S = 86400.0
# A device pauses if it misses this many readings (at the interval of the last two), or this long.
PAUSE_READINGS = 5
PAUSE_S = 10.0


@dataclass(slots=True)
class LostDevice(Watched):
    """A device with the times of its readings.

    began: the first reading. since: the first one after the newest pause. well: the last good one.
    missed: when the device was first found to be silent.
    """

    began: float = NEVER
    since: float = NEVER
    interval_s: float = 0.0
    well: float | None = None
    missed: float = NEVER
    up: bool = False

    @property
    def pause_s(self) -> float:
        return max(PAUSE_S, PAUSE_READINGS * self.interval_s)

    def read(self, now: float, up: bool) -> None:
        pause_s = now - self.seen
        if not 0 <= pause_s <= self.pause_s:
            self.since = now
        # Two sources may read the same device at almost the same time.
        if 0 <= pause_s < NEVER:
            self.interval_s = max(pause_s, 0.9 * self.interval_s)
        self.began = min(self.began, now)
        self.seen, self.up, self.missed = now, up, NEVER


class DeviceLost(DeviceWatch[LostDevice]):
    """Detects lost and silent devices; it remembers devices over restarts of the daemon.

    A device may be missing on purpose: a card was removed, or the process may use fewer. Nothing
    reports this, so a silent device is expected for FORGET_S only.
    """

    kind = "device_lost"
    state_of = LostDevice
    hold_s, clear_s = SILENT_S, 5.0
    severity = "critical"

    def examine(self, device: LostDevice, seen: DeviceReading) -> Symptom | None:
        device.read(seen.time, seen.up)
        if seen.up:
            device.well = seen.time
            return Symptom(0.0, "the GPU is read well", 0.0)
        if seen.reason in PRESENT:
            return Symptom(0.0, "the GPU is there")
        gone_s = None if device.well is None else seen.time - device.well
        since = f" for {gone_s:.0f} s" if gone_s else ""
        if seen.reason in LOST:
            gone = f" (no reading{since})" if since else ""
            return Symptom(1.0, f"the GPU {LOST[seen.reason]}{gone}", gone_s, hold_s=TWICE_S)
        # If no device can be read, the fault is the driver's.
        if not any(self._read_well(seen.time)):
            return None
        text = f"the GPU cannot be read{since} ({seen.reason or 'no reason'}), others can"
        return Symptom(1.0, text, gone_s)

    def _read_well(self, now: float) -> Iterator[LostDevice]:
        """Return the devices with a recent, successful reading."""
        devices: Iterable[LostDevice] = self.state.devices.values()
        return (d for d in devices if d.up and 0 <= now - d.seen <= d.pause_s)

    def check_all(self, now: float) -> Iterator[DetectorResult]:
        """Find silent devices."""
        devices: dict[str, LostDevice] = self.state.devices
        for uuid, device in list(devices.items()):
            gone_s = now - device.seen
            limit_s = max(SILENT_S, PAUSE_READINGS * device.interval_s)
            if gone_s < limit_s:
                continue
            is_forgotten = now - device.missed >= FORGET_S
            if is_forgotten or uuid.startswith(NO_GPUS) or self._is_replaced(device):
                del devices[uuid]
                yield Cleared(now, device=uuid)
            elif any(now - other.since >= limit_s for other in self._read_well(now)):
                device.up, device.missed = False, min(device.missed, now)
                text = f"the GPU has given no reading for {gone_s:.0f} s, others go on"
                yield from self.follow(uuid, device, Symptom(1.0, text, gone_s, hold_s=0.0), now)

    def _is_replaced(self, device: LostDevice) -> bool:
        """Return whether another GPU has appeared since; a MIG device does not count."""
        devices: dict[str, LostDevice] = self.state.devices
        return any(
            other.began > device.seen and not uuid.startswith("MIG-")
            for uuid, other in devices.items()
        )


# The reason of the source's watchdog, which has already waited: the device is found at once.
STUCK = "stuck"


@dataclass(slots=True)
class StuckDevice(Watched):
    """A device. well: when a call last returned."""

    well: float | None = None


class DeviceStuck(DeviceWatch[StuckDevice]):
    kind = "device_stuck"
    state_of = StuckDevice
    clear_s = 5.0
    severity = "critical"

    def examine(self, device: StuckDevice, seen: DeviceReading) -> Symptom:
        """Return the symptom of a call that has not returned, which other states disprove."""
        if seen.up or seen.reason != STUCK:
            device.well = seen.time
            return Symptom(0.0, "the driver's calls for the GPU come back", 0.0)
        stuck_s = None if device.well is None else seen.time - device.well
        lasting = "" if stuck_s is None else f" for {stuck_s:.0f} s"
        return Symptom(1.0, f"a driver call for the GPU has not returned{lasting}", stuck_s)


# --- service ---

RECOVERY_ACTION = series("recovery_action")
# Counted since the driver was loaded, or the GPU was reset.
ERRORS = series("ecc_errors_total", "uncorrected")
COUNTS = {n: series("xid_errors_total", str(n)) for n, xid in XIDS.items() if xid.needs}
TIMES = {number: series("xid_last_timestamp_seconds", str(number)) for number in COUNTS}
_SERIES = {*COUNTS.values(), *TIMES.values()}
# nvml.h: NVML_GPU_RECOVERY_ACTION_*.
ACTIONS = {
    1: "a reset",
    2: "a reboot of the node",
    3: "a drain of peer-to-peer work",
    4: "a drain and a reset",
}
RESET_REQUIRED = "reset_required"
REFUSES = "a reset, without which it does not use the GPU"
# From the least need to the most.
NEEDS = ("", "reset", "reboot", "replacement")
# An XID that is this old was reported before the daemon started.
OLD_S = 60.0


@dataclass(slots=True)
class ServedDevice(Watched):
    """A device, and the reason why it needs service (if ``hysteresis.found``).

    xid: the gravest XID that requires service. ask: the service that the driver asks for. waived:
    an ask that an operator has resolved. counts: by XID. settled: the time until which XIDs are
    handled. served: whether it was reset or rebooted since. driver_load, slot: as in a reading.
    errors: the newest count of errors.
    """

    xid: int | None = None
    ask: str = ""
    waived: str = ""
    counts: dict[int, float] = field(default_factory=dict)
    settled: float = -NEVER
    served: bool = False
    driver_load: str = ""
    slot: str = ""
    errors: float = 0.0

    @property
    def asks(self) -> bool:
        return bool(self.ask) and self.ask != self.waived

    @property
    def sentence(self) -> str:
        xid = explain(self.xid or 0)
        said = [f"XID {xid.number} ({xid.name}), needs a {xid.needs}"] if self.xid else []
        return "; ".join([*said, *([f"the driver asks for {self.ask}"] if self.asks else [])])


class DeviceNeedsService(DeviceDetector[ServedDevice]):
    kind = "device_needs_service"
    state_of = ServedDevice

    def observe(self, seen: Any) -> Results:
        if seen.device.startswith(NO_GPUS):
            return ()
        device = self.device(seen.device)
        results = list(self._end_replaced(seen)) if seen.slot else []
        before = device.sentence
        self._note_service(device, seen)
        self._note_ask(device, seen)
        xid = _fresh_xid(device, seen)
        if xid is not None:
            device.served = False
            if device.xid is None or _need(xid) > _need(device.xid):
                device.xid = xid
        device.seen = seen.time
        if seen.up and device.served and not device.asks and device.hysteresis.found:
            results.append(self.resolve(seen.device, seen.time))
        elif device.xid is not None or device.asks:
            device.hysteresis.found = True
            if device.sentence != before:
                found = Detected(seen.time, "critical", device.sentence, device=seen.device)
                results.append(found)
        return results

    def resolve(self, device: str, now: float) -> Cleared:
        """Forget the present needs; the same need later is another fault."""
        known = self.device(device)
        known.xid, known.waived, known.served = None, known.ask, False
        known.settled = max(now, known.settled)
        known.hysteresis.found = False
        return Cleared(now, device=device, for_good=True)

    def _end_replaced(self, seen: DeviceReading) -> Iterator[DetectorResult]:
        """Resolve the needs of another device that was in the same slot."""
        devices: dict[str, ServedDevice] = self.state.devices
        for uuid, other in devices.items():
            if other.slot == seen.slot and uuid != seen.device and other.hysteresis.found:
                yield self.resolve(uuid, seen.time)

    def _note_service(self, device: ServedDevice, seen: DeviceReading) -> None:
        """Note signs of a reset or reboot, and the values that will show later ones."""
        errors = seen.metrics.get(ERRORS, device.errors)
        device.served |= errors < device.errors or _is_other(device.driver_load, seen.driver_load)
        device.errors = errors
        device.driver_load = seen.driver_load or device.driver_load
        device.slot = seen.slot or device.slot

    def _note_ask(self, device: ServedDevice, seen: DeviceReading) -> None:
        action, before = seen.metrics.get(RECOVERY_ACTION), device.ask
        if not seen.up and seen.reason == RESET_REQUIRED:
            device.ask = REFUSES
        elif action is not None:
            device.ask = ACTIONS.get(int(action), f"action {action:g}") if action else ""
        elif seen.up and before == REFUSES:
            device.ask = ""
        if device.ask != device.waived:
            device.waived = ""
        # The driver asks until the service is done.
        device.served |= bool(before) and not device.ask

    def statuses(self) -> Iterable[DetectorStatus]:
        for uuid, device in self.state.devices.items():
            found = device.hysteresis.found
            text = device.sentence if found else "neither the driver nor an XID asks for service"
            yield DetectorStatus("found" if found else "fine", text, device=uuid)


def _fresh_xid(device: ServedDevice, seen: DeviceReading) -> int | None:
    """Return the gravest new XID after which a GPU needs service."""
    metrics, first = seen.metrics, device.seen == -NEVER
    if metrics.keys().isdisjoint(_SERIES):
        return None
    fine = seen.up and metrics.get(RECOVERY_ACTION) == 0
    fresh, settled = set(), device.settled
    for number, key in COUNTS.items():
        time, count = metrics.get(TIMES[number]), metrics.get(key)
        if time is not None and time > settled:
            # A driver that has the recovery action and asks for nothing has dealt with an old one.
            if not (fine and time < seen.time - OLD_S):
                fresh.add(number)
            device.settled = max(device.settled, time)
        if count is not None and count != device.counts.get(number):
            if count > device.counts.get(number, 0.0) and not first:
                fresh.add(number)
            device.counts[number] = count
    return max(fresh, key=_need, default=None)


def _need(xid: int) -> int:
    return NEEDS.index(explain(xid).needs)


def _is_other(before: str, now: str) -> bool:
    """Return whether node or driver were started again; an unknown part is ignored."""
    parts = zip(before.split("/"), now.split("/"), strict=False)
    return bool(before and now) and any(old != new for old, new in parts)


# --- idle devices ---

MEMORY_USED, MEMORY_TOTAL = series("memory_used_bytes"), series("memory_total_bytes")
BUSY_SECONDS = series("busy_seconds_total")
# A desktop or a monitor causes this utilization.
MAX_UTILIZATION = 0.02
# The contexts of processes that do nothing take less.
MIN_MEMORY_SHARE = 0.05


@dataclass(slots=True)
class IdleDevice(Watched):
    """A device. idle_since: its first idle reading. busy_s: the driver's counter of busy time."""

    idle_since: float = 0.0
    busy_s: float | None = None


class DeviceIdle(DeviceWatch[IdleDevice]):
    kind = "device_idle"
    state_of = IdleDevice
    unknown = "the GPU reports neither its utilization nor who uses it"
    # A lone kernel does not count as work.
    clear_s = 10.0

    def __init__(self, config: DeviceIdleConfig, ranks: RankDevices) -> None:
        super().__init__()
        self._ranks = ranks
        self.hold_s = config.after_s

    def examine(self, device: IdleDevice, seen: DeviceReading) -> Symptom | None:
        """Return the symptom. It warns only of trainings: a server may wait for requests."""
        metrics, now = seen.metrics, seen.time
        busy = utilization(metrics)
        if busy is None:
            return None
        busy = max(busy, self._counted(device, seen))
        used, total = metrics.get(MEMORY_USED), metrics.get(MEMORY_TOTAL)
        share = used / total if used is not None and total else 0.0
        users = list(self._ranks.on(seen.device))
        who = next((f"rank {rank} of {job.name}" for job, rank in users), "")
        trains = any(not self._ranks.jobs[job][rank].serves for job, rank in users)
        severity: Severity = "warning" if trains else "info"
        if not (who or share >= MIN_MEMORY_SHARE) or busy > MAX_UTILIZATION:
            text = "the GPU is busy, or no one uses it"
            return Symptom(0.0, text, 0.0, limit=self.hold_s, severity=severity)
        if not device.hysteresis.found:
            since = device.hysteresis.since
            device.idle_since = now if since is None else since
        idle_s = now - device.idle_since
        text = (
            f"nothing has run on the GPU for {idle_s / 60:.0f} min, while {who or 'a process'} is "
            f"on it and {share * 100:.0f} % of its memory is in use"
        )
        return Symptom(1.0, text, idle_s, limit=self.hold_s, severity=severity)

    def _counted(self, device: IdleDevice, seen: DeviceReading) -> float:
        """Return the busy share of the time since the last reading, by the driver's counter."""
        total_s = seen.metrics.get(BUSY_SECONDS)
        before_s, device.busy_s = device.busy_s, total_s
        passed_s = seen.time - device.seen
        if total_s is None or before_s is None or passed_s <= 0:
            return 0.0
        return (total_s - before_s) / passed_s
