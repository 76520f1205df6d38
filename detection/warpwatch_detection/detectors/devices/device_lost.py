"""Finds devices that are lost, silent while others are read, or stuck in a call of the driver."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from warpwatch_detection.detector import NEVER, Cleared, DetectorResult, Results
from warpwatch_detection.detectors.devices.watch import DeviceWatch, Symptom, Watched
from warpwatch_telemetry.records import DeviceReading

SILENT = "silent"
# The reasons that the sources publish for a lost device.
LOST = {
    "lost": "does not answer any more: it has fallen off the bus or the driver does not list it",
    "reset_required": "does not work until it is reset",
}
# With these reasons the device is present. Another kind reports it, or it is not a fault.
PRESENT = ("stuck", "no_permission")
# The UUIDs of MIG devices, which may be removed, and of indices whose UUID was never read.
MAY_GO = ("MIG-", "unknown-")
# Longer than a driver takes to initialise a GPU (up to 32 s were measured).
SILENT_S = 45.0
# A GPU without readings may have been removed on purpose, so after a day it is no longer expected.
FORGET_S = 86400.0
# A device pauses if it misses this many readings (at the interval of the last two), or this long.
PAUSE_READINGS = 5
PAUSE_S = 10.0
CHECK_INTERVAL_S = 1.0


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
    reason: str = ""

    @property
    def pause_s(self) -> float:
        return max(PAUSE_S, PAUSE_READINGS * self.interval_s)


class DeviceLost(DeviceWatch[LostDevice]):
    """Detects lost and silent devices; it remembers devices over restarts of the daemon.

    A device may be missing on purpose: a card was removed, or the process may use fewer. Nothing
    reports this, so a silent device is expected for FORGET_S only.
    """

    kind = "device_lost"
    device_type = LostDevice
    stale_s = NEVER
    # The driver must report it twice, as one reading may be wrong.
    hold_s, clear_s = 2.0, 5.0
    usual_severity = "critical"

    def __init__(self) -> None:
        super().__init__()
        self._checked = -NEVER

    def observe(self, seen: Any) -> Results:
        device = self.device(seen.device)
        symptom = self.examine(device, seen)
        results: list[DetectorResult] = []
        if symptom is not None:
            hold_s = self.hold_s if device.reason in LOST else SILENT_S
            results.extend(self.follow(seen.device, device, symptom, seen.time, hold_s))
        if abs(seen.time - self._checked) >= CHECK_INTERVAL_S:
            self._checked = seen.time
            results.extend(self._find_silent(seen.time))
        return results

    def examine(self, device: LostDevice, seen: DeviceReading) -> Symptom | None:
        now = seen.time
        self._note(device, now, seen.up)
        if seen.up:
            device.reason, device.well = "", now
            return Symptom(0.0, 0.0)
        gone_s = None if device.well is None else now - device.well
        if seen.reason in PRESENT:
            return Symptom(0.0)
        device.reason = seen.reason
        # If no device can be read, the fault is the driver's.
        if seen.reason in LOST or any(self._read_well(now)):
            return Symptom(1.0, gone_s)
        return None

    def _note(self, device: LostDevice, now: float, up: bool) -> None:
        pause_s = now - device.seen
        if not 0 <= pause_s <= device.pause_s:
            device.since = now
        # Two sources may read the same device at almost the same time.
        if 0 <= pause_s < NEVER:
            device.interval_s = max(pause_s, 0.9 * device.interval_s)
        device.began = min(device.began, now)
        device.seen, device.up, device.missed = now, up, NEVER

    def _read_well(self, now: float) -> Iterator[LostDevice]:
        """Return the devices with a recent, successful reading."""
        devices: Iterable[LostDevice] = self.state.devices.values()
        return (d for d in devices if d.up and 0 <= now - d.seen <= d.pause_s)

    def _find_silent(self, now: float) -> Iterator[DetectorResult]:
        devices: dict[str, LostDevice] = self.state.devices
        for uuid, device in list(devices.items()):
            limit_s = max(SILENT_S, PAUSE_READINGS * device.interval_s)
            if now - device.seen < limit_s:
                continue
            is_forgotten = now - device.missed >= FORGET_S
            if is_forgotten or uuid.startswith(MAY_GO) or self._is_replaced(device):
                del devices[uuid]
                if device.hysteresis.found:
                    yield Cleared(now, device=uuid)
            elif any(now - other.since >= limit_s for other in self._read_well(now)):
                device.reason, device.up = SILENT, False
                device.missed = min(device.missed, now)
                gone_s = now - device.seen
                yield from self.follow(uuid, device, Symptom(1.0, gone_s), now, hold_s=0.0)

    def _is_replaced(self, device: LostDevice) -> bool:
        """Return whether another GPU has appeared since; a MIG device does not count."""
        devices: dict[str, LostDevice] = self.state.devices
        return any(
            other.began > device.seen and not uuid.startswith("MIG-")
            for uuid, other in devices.items()
        )

    def describe(self, device: LostDevice) -> str:
        gone_s = device.hysteresis.value
        since = f" for {gone_s:.0f} s" if gone_s else ""
        if not device.reason:
            return "the GPU is read well"
        if device.reason == SILENT:
            return f"the GPU has given no reading{since}, others go on"
        if device.reason in LOST:
            return f"the GPU {LOST[device.reason]}{f' (no reading{since})' if since else ''}"
        return f"the GPU cannot be read{since} ({device.reason or 'no reason'}), others can"


# The reason of the source's watchdog, which has already waited: the device is found at once.
STUCK = "stuck"


@dataclass(slots=True)
class StuckDevice(Watched):
    """A device. well: when a call last returned."""

    well: float | None = None


class DeviceStuck(DeviceWatch[StuckDevice]):
    kind = "device_stuck"
    device_type = StuckDevice
    clear_s = 5.0
    usual_severity = "critical"

    def examine(self, device: StuckDevice, seen: DeviceReading) -> Symptom:
        """Return the symptom of a call that has not returned, which other states disprove."""
        if seen.up or seen.reason != STUCK:
            device.well = seen.time
            return Symptom(0.0, 0.0)
        return Symptom(1.0, None if device.well is None else seen.time - device.well)

    def describe(self, device: StuckDevice) -> str:
        stuck_s = device.hysteresis.value
        if stuck_s == 0.0:
            return "the driver's calls for the GPU come back"
        lasting = "" if stuck_s is None else f" for {stuck_s:.0f} s"
        return f"a driver call for the GPU has not returned{lasting}"
