"""Detects XIDs, the numbered errors that the driver reports of a GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_detection.config import XidConfig
from warpwatch_detection.detector import NEVER
from warpwatch_detection.detectors.devices.watch import DeviceEvents, EventDevice, Metrics, series
from warpwatch_telemetry.anomalies import SEVERITIES, Detected
from warpwatch_telemetry.records import DeviceReading
from warpwatch_telemetry.xids import explain

COUNTS = "device_xid_errors_total"
# The limits of numbers per device, and in a sentence.
MAX_XIDS = 128
MAX_NAMED = 4
# The advice by the catalogue's field ``blame``: an application's error is not the GPU's.
WHERE = {
    "application": "look at the job",
    "driver": "look at the driver",
    "hardware": "look at the GPU",
    "system": "look at the machine around the GPU",
    "thermal_power": "look at power and cooling",
    "unknown": "the cause is open",
}


@dataclass(slots=True)
class XidCount:
    """The count of an XID. last_time: the source's time of the newest."""

    total: float = 0.0
    last_time: float = -NEVER


@dataclass(slots=True)
class XidDevice(EventDevice):
    """leading: the first of the recent XIDs of highest severity; others: the rest, in order."""

    counts: dict[str, XidCount] = field(default_factory=dict)
    leading: int | None = None
    others: list[int] = field(default_factory=list)


class XidErrors(DeviceEvents[XidDevice]):
    """Names the first XID of the highest severity within ``hold_s``: it is the cause."""

    kind = "xid"
    device_type = XidDevice
    unknown = "no XID was seen, and none is counted from the start"
    fine = "no XID lately"

    def __init__(self, config: XidConfig, hold_s: float) -> None:
        super().__init__(hold_s)
        self._least = SEVERITIES.index(config.min_severity)
        self._ignored = frozenset(config.ignored)

    def examine(self, device: XidDevice, seen: DeviceReading) -> Detected | None:
        metrics, first = seen.metrics, device.seen == -NEVER
        numbers = [key[1][0] for key in metrics if key[0] == COUNTS]
        risen = [int(n) for n in numbers if self._has_risen(device, n, metrics, first)]
        fresh = [xid for xid in risen if self._is_wanted(xid)]
        device.known = bool(device.counts)
        if not fresh:
            return None
        if not self.lasts(device, seen.time):
            device.leading, device.others = None, []
        for xid in fresh:
            self._rank(device, xid)
        return self._found(device, seen)

    def _has_risen(self, device: XidDevice, number: str, metrics: Metrics, first: bool) -> bool:
        """Return whether the XID occurred since the last reading; never on the first reading."""
        total = metrics[COUNTS, (number,)]
        count = device.counts.get(number)
        if count is None:
            if len(device.counts) >= MAX_XIDS or not number.isdecimal():
                return False
            count = device.counts[number] = XidCount()
        elif total == count.total == 0:
            return False
        last_time = metrics.get(series("xid_last_timestamp_seconds", number), count.last_time)
        # If a counter started again at 0, the XID is new only if its last time is later.
        risen = total > count.total or (total > 0 and last_time > count.last_time)
        count.total, count.last_time = total, last_time
        return risen and not first

    def _is_wanted(self, number: int) -> bool:
        return _weight(number) >= self._least and number not in self._ignored

    def _rank(self, device: XidDevice, number: int) -> None:
        leading = device.leading
        if leading is None or _weight(number) > _weight(leading):
            device.leading = number
            number = leading if leading is not None else number
        if number != device.leading and number not in device.others:
            device.others = [*device.others, number][-MAX_NAMED:]

    def _found(self, device: XidDevice, seen: DeviceReading) -> Detected:
        assert device.leading is not None
        xid = explain(device.leading)
        others = f"; then XID {', '.join(map(str, device.others))}" if device.others else ""
        return Detected(
            time=seen.time,
            severity=xid.severity,
            summary=f"XID {xid.number} ({xid.name}); {WHERE[xid.blame]}{others}",
            device=seen.device,
            value=float(xid.number),
        )


def _weight(number: int) -> int:
    return SEVERITIES.index(explain(number).severity)
