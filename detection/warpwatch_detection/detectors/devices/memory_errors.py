"""Detects memory errors of a device: lost data, and bad rows that are replaced."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_detection.detectors.devices.watch import (
    CounterGrowth,
    DeviceEvents,
    EventDevice,
    Metrics,
    series,
)
from warpwatch_telemetry.anomalies import Detected, Severity
from warpwatch_telemetry.records import DeviceReading

SINCE_LOADED = series("ecc_errors_total", "uncorrected")
OF_LIFE = series("ecc_aggregate_errors_total", "uncorrected")


@dataclass(slots=True)
class EccDevice(EventDevice):
    """The counters. ``fresh``: the new errors of the anomaly."""

    since_loaded: CounterGrowth = field(default_factory=CounterGrowth)
    of_life: CounterGrowth = field(default_factory=CounterGrowth)
    fresh: float = 0.0


class EccUncorrectable(DeviceEvents[EccDevice]):
    """Detects growth of the count since the driver was loaded, else of the device's life.

    Counts of the first reading are old.
    """

    kind = "ecc_uncorrectable"
    device_type = EccDevice
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


FAILURE, PENDING = series("row_remap_failure"), series("row_remap_pending")
# GPUs before Ampere retire pages instead.
PAGES_PENDING = series("retired_pages_pending")
ROWS = series("remapped_rows", "uncorrectable"), series("remapped_rows", "correctable")
# A lasting state is reported again at this interval, or sooner so that the anomaly stays open.
REPEAT_S = 60.0

FAILED = "remapping a bad memory row has failed: the GPU must be replaced"
WAITS = "bad memory waits for the GPU's next reset to be taken out of use"


@dataclass(slots=True)
class RemapDevice(EventDevice):
    """A device with the rows that were remapped so far."""

    rows: float | None = None


class RowRemap(DeviceEvents[RemapDevice]):
    """Detects failed and pending remappings while they last, also on the first reading.

    Rows that were remapped before the first reading are old.
    """

    kind = "row_remap"
    device_type = RemapDevice
    unknown = "the GPU does not report remapped rows"
    fine = "no memory waits for being replaced, none was lately"

    def __init__(self, hold_s: float) -> None:
        super().__init__(hold_s)
        self._repeat_s = min(REPEAT_S, hold_s / 2)

    def examine(self, device: RemapDevice, seen: DeviceReading) -> Detected | None:
        metrics = seen.metrics
        pending = _any_of(metrics, PENDING, PAGES_PENDING)
        failure = metrics.get(FAILURE)
        grown = self._grown(device, metrics)
        device.known |= pending is not None or failure is not None
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


def _any_of(metrics: Metrics, *keys: tuple[str, tuple[str, ...]]) -> float | None:
    values = [value for key in keys if (value := metrics.get(key)) is not None]
    return max(values, default=None)
