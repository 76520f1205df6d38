"""Which series of a reading the detectors look up, and how busy a device is by them."""

from __future__ import annotations

from collections.abc import Mapping

from warpwatch_telemetry.metric import SeriesKey

Metrics = Mapping[SeriesKey, float]


def series(name: str, *labels: str) -> SeriesKey:
    """The key of a device's metric by its name without the prefix ``device_``."""
    return f"device_{name}", labels


_UTILIZATION, _GRAPHICS = series("utilization_ratio"), series("graphics_active_ratio")


def utilization(metrics: Metrics) -> float | None:
    """Share of time in which something ran, 0 to 1; None: not known.

    GPUs in MIG mode and MIG devices have no utilization, but may have GPM's counters.
    """
    busy = metrics.get(_UTILIZATION)
    return metrics.get(_GRAPHICS) if busy is None else busy


# Below half of its utilization the driver lowers clocks by itself.
MIN_UTILIZATION = 0.5


def is_loaded(metrics: Metrics) -> bool | None:
    """Return whether the device has enough to do for its full clock; None if that is unknown."""
    busy = utilization(metrics)
    return None if busy is None else busy >= MIN_UTILIZATION
