"""Detects errors that a device reports: lost data, bad memory rows that are replaced, and XIDs."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_detection.config import XidConfig
from warpwatch_detection.detector import NEVER
from warpwatch_detection.detectors.devices.watch import (
    CounterGrowth,
    DeviceEvents,
    EventDevice,
    Metrics,
    series,
)
from warpwatch_telemetry.anomalies import SEVERITIES, Detected, Severity
from warpwatch_telemetry.records import DeviceReading
from warpwatch_telemetry.xids import explain

SINCE_LOADED = series("ecc_errors_total", "uncorrected")
OF_LIFE = series("ecc_aggregate_errors_total", "uncorrected")


@dataclass(slots=True)
class EccDevice(EventDevice):
    """A device with its counters. fresh: the new errors of the present anomaly."""

    since_loaded: CounterGrowth = field(default_factory=CounterGrowth)
    of_life: CounterGrowth = field(default_factory=CounterGrowth)
    fresh: float = 0.0


class EccUncorrectable(DeviceEvents[EccDevice]):
    """Detects growth of the count since the driver was loaded, else of that of the device's life.

    The counts of the first reading are old.
    """

    kind = "ecc_uncorrectable"
    state_of = EccDevice
    unknown = "the GPU does not count memory errors (no ECC, or switched off)"
    fine = "no new uncorrectable memory errors"

    def examine(self, device: EccDevice, seen: DeviceReading) -> Detected | None:
        if (total := seen.metrics.get(SINCE_LOADED)) is not None:
            grown = device.since_loaded.grow_to(total)
        elif device.since_loaded.last is None and (total := seen.metrics.get(OF_LIFE)) is not None:
            grown = device.of_life.grow_to(total)
        device.known |= total is not None
        if total is None or not grown:
            return None
        device.fresh = grown + (device.fresh if self.lasts(device, seen.time) else 0.0)
        many = "error" if device.fresh == 1 else "errors"
        return Detected(
            time=seen.time,
            severity="critical",
            summary=f"{device.fresh:.0f} new uncorrectable memory {many}: data on the GPU was lost",
            device=seen.device,
            value=device.fresh,
            baseline=total - grown,
        )


FAILURE = series("row_remap_failure")
# GPUs before Ampere retire pages instead of rows.
PENDING = series("row_remap_pending"), series("retired_pages_pending")
ROWS = series("remapped_rows", "uncorrectable"), series("remapped_rows", "correctable")
# A lasting state is reported again at this interval, or sooner so that the anomaly stays open.
REPEAT_S = 60.0

FAILED = "remapping a bad memory row has failed: the GPU must be replaced"
WAITS = "bad memory waits for the GPU's next reset to be taken out of use"


@dataclass(slots=True)
class RemapDevice(EventDevice):
    """A device. rows: the rows that were remapped so far."""

    rows: float | None = None


class RowRemap(DeviceEvents[RemapDevice]):
    """Detects failed and pending remappings while they last, also on the first reading.

    Rows that were remapped before the first reading are old.
    """

    kind = "row_remap"
    state_of = RemapDevice
    unknown = "the GPU does not report remapped rows"
    fine = "no memory waits for being replaced, none was lately"

    def __init__(self, hold_s: float) -> None:
        super().__init__(hold_s)
        self._repeat_s = min(REPEAT_S, hold_s / 2)

    def examine(self, device: RemapDevice, seen: DeviceReading) -> Detected | None:
        metrics = seen.metrics
        known = [count for key in PENDING if (count := metrics.get(key)) is not None]
        pending, failure = any(known), metrics.get(FAILURE)
        grown = self._grown(device, metrics)
        device.known |= bool(known) or failure is not None
        severity: Severity = "warning"
        if failure:
            severity, text = "critical", FAILED
        elif grown:
            rows = "row was" if grown == 1 else "rows were"
            text = f"{grown:.0f} bad memory {rows} replaced by spare ones"
        elif pending:
            text = WAITS
        else:
            return None
        again = 0 <= seen.time - device.found_time < self._repeat_s
        if again and not grown and text == device.summary:
            return None
        return Detected(seen.time, severity, text, device=seen.device, value=device.rows)

    def _grown(self, device: RemapDevice, metrics: Metrics) -> float:
        counts = [count for key in ROWS if (count := metrics.get(key)) is not None]
        if not counts:
            return 0.0
        before, device.rows = device.rows, sum(counts)
        device.known = True
        return 0.0 if before is None else max(0.0, device.rows - before)


COUNTS = "device_xid_errors_total"
# The most XIDs per device, and in a sentence.
MAX_XIDS = 128
MAX_NAMED = 4
# The advice by the catalogue's field ``blame``: an error of an application is not the GPU's.
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
    """The count of an XID. last_time: the time of the newest one, as its source reports it."""

    total: float = 0.0
    last_time: float = -NEVER


@dataclass(slots=True)
class XidDevice(EventDevice):
    """A device. recent: the XIDs of the present anomaly, the first one first."""

    counts: dict[str, XidCount] = field(default_factory=dict)
    recent: list[int] = field(default_factory=list)


class XidErrors(DeviceEvents[XidDevice]):
    """Names the first XID of the highest severity within ``hold_s``, because it is the cause."""

    kind = "xid"
    state_of = XidDevice
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
        fresh = [xid for xid in risen if _weight(xid) >= self._least and xid not in self._ignored]
        device.known = bool(device.counts)
        if not fresh:
            return None
        if not self.lasts(device, seen.time):
            device.recent = []
        device.recent += [xid for xid in fresh if xid not in device.recent]
        cause = max(device.recent, key=_weight)
        xid = explain(cause)
        others = [str(other) for other in device.recent if other != cause][-MAX_NAMED:]
        then = f"; then XID {', '.join(others)}" if others else ""
        return Detected(
            time=seen.time,
            severity=xid.severity,
            summary=f"XID {xid.number} ({xid.name}); {WHERE[xid.blame]}{then}",
            device=seen.device,
            value=float(xid.number),
        )

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


def _weight(number: int) -> int:
    return SEVERITIES.index(explain(number).severity)
