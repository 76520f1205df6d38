"""How far a device is from the temperatures at which it slows down."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_detection.detectors.devices.series import Metrics, series

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


def margins(metrics: Metrics) -> Iterator[tuple[str, float, float]]:
    """Yield each sensor with the degrees left to its threshold, and the threshold, in °C."""
    for sensor, (key, threshold) in SENSORS.items():
        value, limit = metrics.get(key), metrics.get(threshold)
        if value is not None and limit is not None:
            yield sensor, limit - value, limit
    value, margin = metrics.get(SENSORS["GPU"][0]), metrics.get(MARGIN)
    if value is None or margin is None or SENSORS["GPU"][1] in metrics:
        return
    left = margin - metrics.get(MARGIN_SLOWDOWN, 0.0)
    yield "GPU", left, value + left


def is_too_hot(metrics: Metrics) -> bool:
    """Return whether a sensor has reached the temperature at which the device slows down."""
    return any(left <= 0 for _, left, _ in margins(metrics))
