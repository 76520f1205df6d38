"""Uncorrectable memory errors: data was lost."""

from __future__ import annotations

from dataclasses import dataclass

from warpwatch_detection.detector import NEVER, DetectorStatus
from warpwatch_detection.detectors.devices.series import series
from warpwatch_detection.detectors.devices.watch import DeviceEvents, Watched
from warpwatch_telemetry.anomalies import Found
from warpwatch_telemetry.records import DeviceReading

SINCE_LOADED = series("ecc_errors_total", "uncorrected")
OF_LIFE = series("ecc_aggregate_errors_total", "uncorrected")


@dataclass(slots=True)
class EccDevice(Watched):
    """The newest counts; None: not known. ``fresh``: new ones within the anomaly."""

    since_loaded: float | None = None
    of_life: float | None = None
    fresh: float = 0.0


class EccUncorrectable(DeviceEvents[EccDevice]):
    """Growth of the count since the driver was loaded; where there is none, of the device's life.

    What the first reading brings is old.
    """

    kind = "ecc_uncorrectable"
    device_type = EccDevice
    unknown = "the GPU does not count memory errors (no ECC, or switched off)"

    def __init__(self, hold_s: float) -> None:
        super().__init__()
        self._hold_s = hold_s

    def examine(self, device: EccDevice, seen: DeviceReading) -> Found | None:
        total = seen.metrics.get(SINCE_LOADED)
        if total is not None:
            before, device.since_loaded = device.since_loaded, total
        elif device.since_loaded is None and (total := seen.metrics.get(OF_LIFE)) is not None:
            before, device.of_life = device.of_life, total
        if total is None or before is None:
            return None
        # It begins again at 0 with the driver: then all of it is new.
        grown = total - before if total >= before else total
        if not grown:
            return None
        lasting = 0 <= seen.time - device.found_time <= self._hold_s
        device.fresh = grown + (device.fresh if lasting else 0.0)
        return Found(
            time=seen.time,
            severity="critical",
            summary=_sentence(device),
            device=seen.device,
            value=device.fresh,
            baseline=total - grown,
        )

    def explain(self, uuid: str, device: EccDevice) -> DetectorStatus | None:
        counts = (device.since_loaded, device.of_life)
        total = next((count for count in counts if count is not None), None)
        if total is None:
            return None
        if device.found_time > -NEVER and device.seen - device.found_time <= self._hold_s:
            return DetectorStatus("found", _sentence(device), device=uuid, value=device.fresh)
        text = f"no new uncorrectable memory errors (count {total:.0f})"
        return DetectorStatus("fine", text, device=uuid, value=0.0, baseline=total, limit=1.0)


def _sentence(device: EccDevice) -> str:
    many = "error" if device.fresh == 1 else "errors"
    return f"{device.fresh:.0f} new uncorrectable memory {many}: data on the GPU was lost"
