"""A device that is almost as hot as where it slows down, and does not yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from warpwatch_detection.detectors.devices.hysteresis import Symptom
from warpwatch_detection.detectors.devices.series import Metrics, series
from warpwatch_detection.detectors.devices.watch import DeviceWatch, Watched
from warpwatch_telemetry.records import DeviceReading

# Temperature and the threshold for it.
SENSORS = {
    "GPU": (
        series("temperature_celsius", "gpu"),
        series("temperature_threshold_celsius", "slowdown"),
    ),
    "memory": (
        series("temperature_celsius", "memory"),
        series("temperature_threshold_celsius", "memory_max"),
    ),
}
# From Ada on: how much warmer it may get (T.Limit), and the margin at which it slows down.
MARGIN = series("temperature_margin_celsius")
MARGIN_SLOWDOWN = series("temperature_margin_threshold_celsius", "slowdown")
# So near to where it slows down; healthy GPUs under full load keep 10 °C and more.
MARGIN_CELSIUS = 4.0
# It is over so far below the margin.
RELEASE_CELSIUS = 3.0
THROTTLED = tuple(series("throttle_active", reason) for reason in ("sw_thermal", "hw_thermal"))


@dataclass(slots=True)
class HotDevice(Watched):
    """``sensor``: the one nearest to its threshold."""

    sensor: str = "GPU"


class Overheating(DeviceWatch[HotDevice]):
    """Not opened while heat holds clocks down: that is `thermal_throttle`."""

    kind = "overheating"
    device_type = HotDevice
    unknown = "the GPU does not report its temperature, or not where it slows down"
    hold_s, clear_s = 60.0, 30.0

    def examine(self, device: HotDevice, seen: DeviceReading) -> Symptom | None:
        margins = {sensor: (left, limit) for sensor, left, limit in _margins(seen.metrics)}
        if not margins:
            return None
        sensor = device.sensor = min(margins, key=lambda name: margins[name][0])
        left_c, limit_c = margins[sensor]
        # 1 at the margin, half of it where it begins to be over.
        excess = max(0.0, 1.0 + (MARGIN_CELSIUS - left_c) / (2 * RELEASE_CELSIUS))
        if excess >= 1 and not device.hysteresis.found and any(map(seen.metrics.get, THROTTLED)):
            # Neither well nor what this kind is about.
            device.hysteresis.interrupt()
            return None
        return Symptom(excess, limit_c - left_c, limit_c, limit_c - MARGIN_CELSIUS)

    def describe(self, device: HotDevice) -> str:
        value, limit = device.hysteresis.value or 0.0, device.hysteresis.baseline or 0.0
        return (
            f"the {device.sensor} is at {value:.0f} °C, {limit - value:.0f} °C below the "
            f"{limit:.0f} °C at which the device slows down"
        )


def _margins(metrics: Metrics) -> Iterator[tuple[str, float, float]]:
    """Sensor, degrees left to its threshold, and the threshold."""
    for sensor, (key, threshold) in SENSORS.items():
        value, limit = metrics.get(key), metrics.get(threshold)
        if value is not None and limit is not None:
            yield sensor, limit - value, limit
    value, margin = metrics.get(SENSORS["GPU"][0]), metrics.get(MARGIN)
    if value is None or margin is None or SENSORS["GPU"][1] in metrics:
        return
    left = margin - metrics.get(MARGIN_SLOWDOWN, 0.0)
    yield "GPU", left, value + left
