"""A device that is almost as hot as where it slows down, or hotter."""

from __future__ import annotations

from dataclasses import dataclass

from warpwatch_detection.detectors.devices.heat import margins
from warpwatch_detection.detectors.devices.hysteresis import Symptom
from warpwatch_detection.detectors.devices.watch import DeviceWatch, Watched
from warpwatch_telemetry.records import DeviceReading

# So near to where it slows down; healthy GPUs under full load keep 10 °C and more.
MARGIN_CELSIUS = 4.0
# It is over so far below the margin.
RELEASE_CELSIUS = 3.0


@dataclass(slots=True)
class HotDevice(Watched):
    """``sensor``: the one nearest to its threshold."""

    sensor: str = "GPU"


class Overheating(DeviceWatch[HotDevice]):
    """Explained by `thermal_throttle` while that is active."""

    kind = "overheating"
    device_type = HotDevice
    unknown = "the GPU does not report its temperature, or not where it slows down"
    hold_s, clear_s = 60.0, 30.0

    def examine(self, device: HotDevice, seen: DeviceReading) -> Symptom | None:
        found = min(margins(seen.metrics), key=lambda margin: margin[1], default=None)
        if found is None:
            return None
        device.sensor, left_c, limit_c = found
        # 1 at the margin, half of it where it begins to be over.
        excess = max(0.0, 1.0 + (MARGIN_CELSIUS - left_c) / (2 * RELEASE_CELSIUS))
        return Symptom(excess, limit_c - left_c, limit_c, limit_c - MARGIN_CELSIUS)

    def describe(self, device: HotDevice) -> str:
        value, limit = device.hysteresis.value or 0.0, device.hysteresis.baseline or 0.0
        side = "above" if value > limit else "below"
        return (
            f"the {device.sensor} is at {value:.0f} °C, {abs(limit - value):.0f} °C {side} the "
            f"{limit:.0f} °C at which the device slows down"
        )
