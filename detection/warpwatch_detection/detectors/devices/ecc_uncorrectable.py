"""Uncorrectable memory errors: data was lost."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_detection.detector import DetectorStatus
from warpwatch_detection.detectors.devices.hysteresis import CounterGrowth
from warpwatch_detection.detectors.devices.series import series
from warpwatch_detection.detectors.devices.watch import DeviceEvents, Watched
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.records import DeviceReading

SINCE_LOADED = series("ecc_errors_total", "uncorrected")
OF_LIFE = series("ecc_aggregate_errors_total", "uncorrected")


@dataclass(slots=True)
class EccDevice(Watched):
    """The counts that are known. ``fresh``: new ones within the anomaly."""

    since_loaded: CounterGrowth = field(default_factory=CounterGrowth)
    of_life: CounterGrowth = field(default_factory=CounterGrowth)
    fresh: float = 0.0

    @property
    def count(self) -> CounterGrowth:
        return self.of_life if self.since_loaded.last is None else self.since_loaded


class EccUncorrectable(DeviceEvents[EccDevice]):
    """Growth of the count since the driver was loaded; where there is none, of the device's life.

    What the first reading brings is old.
    """

    kind = "ecc_uncorrectable"
    device_type = EccDevice
    unknown = "the GPU does not count memory errors (no ECC, or switched off)"

    def examine(self, device: EccDevice, seen: DeviceReading) -> Detected | None:
        if (total := seen.metrics.get(SINCE_LOADED)) is not None:
            grown = device.since_loaded.take(total)
        elif device.since_loaded.last is None and (total := seen.metrics.get(OF_LIFE)) is not None:
            grown = device.of_life.take(total)
        if total is None or not grown:
            return None
        device.fresh = grown + (device.fresh if self.lasts(device, seen.time) else 0.0)
        return Detected(
            time=seen.time,
            severity="critical",
            summary=_sentence(device),
            device=seen.device,
            value=device.fresh,
            baseline=total - grown,
        )

    def explain(self, uuid: str, device: EccDevice) -> DetectorStatus | None:
        total = device.count.last
        if total is None:
            return None
        if self.lasts(device, device.seen):
            return DetectorStatus("found", _sentence(device), device=uuid, value=device.fresh)
        text = f"no new uncorrectable memory errors (count {total:.0f})"
        return DetectorStatus("fine", text, device=uuid, value=0.0, baseline=total, limit=1.0)


def _sentence(device: EccDevice) -> str:
    many = "error" if device.fresh == 1 else "errors"
    return f"{device.fresh:.0f} new uncorrectable memory {many}: data on the GPU was lost"
