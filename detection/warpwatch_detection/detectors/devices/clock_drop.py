"""Detects clocks under load that are lower than this device's usual ones without a reason."""

from __future__ import annotations

from dataclasses import dataclass

from warpwatch_detection.detector import NEVER
from warpwatch_detection.detectors.devices.throttle import is_too_hot
from warpwatch_detection.detectors.devices.watch import (
    DeviceWatch,
    Metrics,
    Symptom,
    Watched,
    is_loaded,
    series,
)
from warpwatch_telemetry.catalogue import THROTTLE_REASONS, TIMED_THROTTLE_REASONS
from warpwatch_telemetry.records import DeviceReading

CLOCK = series("clock_hertz", "sm")
ACTIVE = tuple(series("throttle_active", reason) for reason in THROTTLE_REASONS)
TIMED = tuple(series("throttle_seconds_total", reason) for reason in TIMED_THROTTLE_REASONS)
# Load moves the clock of a healthy GPU by 5 to 10 %.
MIN_DROP = 0.15
# A clock is a mean over a block; the device's usual clock is known after READY_BLOCKS.
BLOCK_S = 20.0
READY_BLOCKS = 4
# A block needs this many readings under load, and at least this share of them without a reason.
BLOCK_READINGS = 3
CLEAN_SHARE = 0.8
# A healthy GPU meets its power limit now and then. A reason explains the clock only if it is active
# for more than this share of the time.
EXPLAINED_SHARE = 0.1
# If a block lacks readings under load after this many times BLOCK_S, it starts again.
MOST_BLOCKS = 3
# How fast the level follows a block above it and below it: it stays near the highest recent clock.
RISE, FALL = 0.5, 0.05


@dataclass(slots=True)
class ClockDevice(Watched):
    """A device with its usual clock under load (``level_hz``, of ``blocks`` blocks) and open block.

    held_s: how long reasons have held clocks down in all, as read at ``held_time``.
    """

    level_hz: float = 0.0
    blocks: int = 0
    begun: float | None = None
    clean: int = 0
    explained: int = 0
    sum_hz: float = 0.0
    held_s: float = 0.0
    held_time: float = -NEVER


class ClockDrop(DeviceWatch[ClockDevice]):
    """The detector of a clock that no reason explains.

    Reasons are the driver's (power, heat, clocks that were set) and heat itself
    (`thermal_throttle`).
    """

    kind = "clock_drop"
    device_type = ClockDevice
    unknown = "not enough load yet without a reason for lower clocks"
    hold_s, clear_s = 40.0, BLOCK_S

    def examine(self, device: ClockDevice, seen: DeviceReading) -> Symptom | None:
        metrics, now = seen.metrics, seen.time
        clock_hz, loaded, reasons = metrics.get(CLOCK), is_loaded(metrics), _reasons(metrics)
        if clock_hz is None or loaded is None or reasons is None:
            return None
        explained = _held_share(device, metrics, now) > EXPLAINED_SHARE or reasons
        if device.begun is None or not 0 <= now - device.begun <= MOST_BLOCKS * BLOCK_S:
            _begin(device, now)
        if not loaded:
            return None
        if explained:
            device.explained += 1
        else:
            device.clean += 1
            device.sum_hz += clock_hz
        assert device.begun is not None
        full = now - device.begun >= BLOCK_S and device.clean + device.explained >= BLOCK_READINGS
        return self._judge(device, now) if full else None

    def _judge(self, device: ClockDevice, now: float) -> Symptom | None:
        """Compare the full block with the level, and start the next block."""
        clean = device.clean / (device.clean + device.explained)
        block_hz = device.sum_hz / device.clean if device.clean else 0.0
        _begin(device, now)
        if clean < CLEAN_SHARE:
            device.hysteresis.interrupt()
            return None
        if device.blocks < READY_BLOCKS:
            device.blocks += 1
            device.level_hz = max(device.level_hz, block_hz)
            return None
        level_hz = device.level_hz
        excess = max(0.0, 1 - block_hz / level_hz) / MIN_DROP if level_hz else 0.0
        if excess < 1:
            pull = RISE if block_hz > level_hz else FALL
            # The level does not follow a drop of half the limit or more.
            device.level_hz += pull * (block_hz - level_hz) if excess < 0.5 else 0.0
        return Symptom(excess, block_hz, level_hz, (1 - MIN_DROP) * level_hz)

    def describe(self, device: ClockDevice) -> str:
        value, level = device.hysteresis.value or 0.0, device.hysteresis.baseline or 0.0
        if not device.hysteresis.found:
            return f"the SM clock under load is {value / 1e6:.0f} MHz, usually {level / 1e6:.0f}"
        drop = 100 * (1 - value / level)
        return (
            f"the SM clock under load is {value / 1e6:.0f} MHz, {drop:.0f} % below this GPU's "
            f"usual {level / 1e6:.0f} MHz, and the driver gives no reason"
        )


def _begin(device: ClockDevice, now: float) -> None:
    device.begun, device.clean, device.explained, device.sum_hz = now, 0, 0, 0.0


def _held_share(device: ClockDevice, metrics: Metrics, now: float) -> float:
    """Return the share of the time since the last reading in which a reason was active."""
    total_s = sum(metrics.get(key, 0.0) for key in TIMED)
    grown_s, passed_s = total_s - device.held_s, now - device.held_time
    device.held_s, device.held_time = total_s, now
    return grown_s / passed_s if passed_s > 0 else 0.0


def _reasons(metrics: Metrics) -> bool | None:
    """Return whether a reason or heat holds clocks down now; None if reasons are unknown."""
    active = [value for key in ACTIVE if (value := metrics.get(key)) is not None]
    return any(active) or is_too_hot(metrics) if active else None
