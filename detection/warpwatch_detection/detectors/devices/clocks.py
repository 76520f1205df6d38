"""Detects clocks that heat or power hold down, clocks that fall without a reason, and heat itself.

Throttling has three signs: the driver counts the time of a reason, it reports the present reasons
(the state), and the clock itself falls. A counter may stand still although its reason holds, so
one sign is enough. The software power cap is ignored: with it a healthy, busy GPU keeps its power
limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from warpwatch_detection.detector import NEVER
from warpwatch_detection.detectors.devices.watch import (
    RELEASE,
    CounterGrowth,
    DeviceWatch,
    Metrics,
    Symptom,
    Watched,
    is_loaded,
    series,
)
from warpwatch_telemetry.anomalies import Severity
from warpwatch_telemetry.catalogue import THROTTLE_REASONS, TIMED_THROTTLE_REASONS
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
# From Ada on: the degrees left (T.Limit), and the degrees left at which the GPU slows down.
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


TEMPERATURE = series("temperature_celsius", "gpu")
CLOCK, CLOCK_MAX = series("clock_hertz", "sm"), series("clock_max_hertz", "sm")
HW_SLOWDOWN = "hw_slowdown"
ACTIVE = {reason: series("throttle_active", reason) for reason in THROTTLE_REASONS}
TIMED = {reason: series("throttle_seconds_total", reason) for reason in TIMED_THROTTLE_REASONS}
# Other reasons for a low clock of a hot GPU: set limits, and idling.
OTHER_REASONS = ("idle", "application_clocks", "sw_power_cap", "sync_boost", "display_clocks")
# A tenth of half a minute costs a job some per cent, and no single short peak counts.
MIN_SHARE = 0.10
# A state that the counter contradicts, or a low clock alone, must last for most of the window.
MIN_CONTRADICTED_SHARE = 0.90
# The window of shares. A throttle is over after this time below half of its limit.
WINDOW_S = 30.0
# A reading of the states is valid for at most this time.
STANDS_S = 10.0
# Load moves the clock of a healthy GPU by 5 to 10 %.
MIN_DROP = 0.15
CLOCK_ALONE = "clock"


@dataclass(slots=True)
class ThrottleReason:
    """The time that one reason has held clocks down, by the driver's counter and by its states.

    strict: whether a state must last, because the driver also counts the time, or does not report
    this reason. active_s: the time under load, by the states.
    """

    strict: bool = False
    counter: CounterGrowth = field(default_factory=CounterGrowth)
    states: CounterGrowth = field(default_factory=CounterGrowth)
    active_s: float = 0.0
    read_time: float | None = None
    counter_share: float = 0.0
    state_share: float = 0.0

    def read(self, now: float, total_s: float | None, active: bool | None) -> bool:
        """Add a reading. Return whether it has the counter or the state."""
        if total_s is not None:
            self.strict = True
            self.counter_share = _share(self.counter, now, total_s)
        if active is not None:
            if active and self.read_time is not None:
                self.active_s += min(STANDS_S, max(0.0, now - self.read_time))
            self.read_time = now
            self.state_share = _share(self.states, now, self.active_s)
        return total_s is not None or active is not None

    def excess(self) -> tuple[float, float, float]:
        """Return excess, share and limit of counter or state, whichever is further above it."""
        state_limit = MIN_CONTRADICTED_SHARE if self.strict else MIN_SHARE
        shares = (self.counter_share, MIN_SHARE), (self.state_share, state_limit)
        share, limit = max(shares, key=lambda one: one[0] / one[1])
        return share / limit, share, limit

    @property
    def words(self) -> str:
        state = f"state {self.state_share:.0%}"
        return state if self.counter.last is None else f"counter {self.counter_share:.0%}, {state}"


def _share(growth: CounterGrowth, now: float, total_s: float) -> float:
    return min(1.0, growth.add(now, total_s, WINDOW_S) / WINDOW_S)


@dataclass(slots=True)
class ThrottledDevice(Watched):
    """A device. worst: the reason that was last furthest above its limit.

    cool_hz: the clock under load before the GPU was too hot, 0 if it is unknown.
    """

    reasons: dict[str, ThrottleReason] = field(default_factory=dict)
    worst: str = ""
    cool_hz: float = 0.0


# Reasons, the seconds that the driver counts for each, and its state under load.
Signs = Iterator[tuple[str, float | None, bool | None]]


class Throttle(DeviceWatch[ThrottledDevice]):
    """Reports the worst of several reasons, because their times overlap."""

    # The reasons whose time the driver counts, and the words of all reasons.
    timed: tuple[str, ...]
    words: ClassVar[dict[str, str]]
    unknown = "the GPU does not report why its clocks are held down"
    state_of = ThrottledDevice
    clear_s = WINDOW_S

    def examine(self, device: ThrottledDevice, seen: DeviceReading) -> Symptom | None:
        found: dict[str, tuple[float, float, float]] = {}
        for name, total_s, active in self._signs(device, seen.metrics):
            reason = device.reasons.get(name)
            if reason is None:
                reason = device.reasons[name] = ThrottleReason(strict=name == CLOCK_ALONE)
            if reason.read(seen.time, total_s, active):
                found[name] = reason.excess()
        if not found:
            return None
        name = max(found, key=lambda name: found[name][0])
        excess, share, limit = found[name]
        if share or not device.worst:
            device.worst = name
        # The hardware's protection at least halves clocks.
        severity: Severity = "critical" if device.worst == "hw_thermal" else "warning"
        text = self._describe(device, seen.metrics, share)
        return Symptom(excess, text, share, limit=limit, severity=severity)

    def _signs(self, device: ThrottledDevice, metrics: Metrics) -> Signs:
        loaded = is_loaded(metrics) is not False
        for name in self.timed:
            active = metrics.get(ACTIVE[name])
            state = None if active is None else loaded and bool(active)
            yield name, metrics.get(TIMED[name]), state

    def _describe(self, device: ThrottledDevice, metrics: Metrics, share: float) -> str:
        text = f"{self.words[device.worst]} {share * 100:.0f} % of the last {WINDOW_S:.0f} s"
        if not share:
            return text
        heat, clock_hz, max_hz = (metrics.get(key) for key in (TEMPERATURE, CLOCK, CLOCK_MAX))
        if heat is not None:
            text += f", at {heat:.0f} °C"
        if clock_hz and max_hz:
            text += f"; the SM clock is {clock_hz / 1e6:.0f} MHz of {max_hz / 1e6:.0f} MHz"
        reasons = device.reasons.items()
        said = [f"{name} {reason.words}" for name, reason in reasons if name != CLOCK_ALONE]
        return f"{text}; the driver: {', '.join(said)}"


class ThermalThrottle(Throttle):
    kind = "thermal_throttle"
    state_version = 2
    timed = ("hw_thermal", "sw_thermal")
    words: ClassVar = {
        "hw_thermal": "heat made the hardware cut clocks (hw_thermal) during",
        "sw_thermal": "heat held clocks down (sw_thermal) during",
        CLOCK_ALONE: "too hot, and the SM clock low under load, during",
    }

    def _signs(self, device: ThrottledDevice, metrics: Metrics) -> Signs:
        yield from super()._signs(device, metrics)
        slow = _is_slow_by_heat(device, metrics)
        if slow is not None:
            yield CLOCK_ALONE, None, slow


class PowerBrake(Throttle):
    """Detects the power brake, which the power supply or the rack applies.

    It also detects a hardware slowdown without heat, which has no counter: the GPU drew too much
    power too quickly.
    """

    kind = "power_brake"
    state_version = 2
    timed = ("hw_power_brake",)
    words: ClassVar = {
        "hw_power_brake": "the power brake held clocks down (hw_power_brake) during",
        HW_SLOWDOWN: "power made the hardware cut clocks (hw_slowdown) during",
    }

    def _signs(self, device: ThrottledDevice, metrics: Metrics) -> Signs:
        yield from super()._signs(device, metrics)
        slowed, hot = metrics.get(ACTIVE[HW_SLOWDOWN]), metrics.get(ACTIVE["hw_thermal"])
        if slowed is not None and hot is not None:
            cool = not hot and not is_too_hot(metrics)
            yield HW_SLOWDOWN, None, bool(slowed) and cool and is_loaded(metrics) is not False


def _is_slow_by_heat(device: ThrottledDevice, metrics: Metrics) -> bool | None:
    """Return whether only heat explains a low clock; None if clock or load is unknown."""
    clock_hz, loaded = metrics.get(CLOCK), is_loaded(metrics)
    reasons = [metrics.get(ACTIVE[name]) for name in OTHER_REASONS]
    if clock_hz is None or loaded is None or None in reasons:
        return None
    if not loaded or any(reasons):
        return False
    if not is_too_hot(metrics):
        device.cool_hz = clock_hz
        return False
    # A clock that was as low before the heat is locked.
    usual_hz = device.cool_hz or metrics.get(CLOCK_MAX, 0.0)
    return clock_hz < (1 - MIN_DROP) * usual_hz


# The limit below the slowdown; healthy GPUs under full load keep 10 °C and more.
MARGIN_CELSIUS = 4.0
# It is over this far below the limit.
RELEASE_CELSIUS = 3.0


class Overheating(DeviceWatch[Watched]):
    """Detects a sensor near its threshold; while `thermal_throttle` is active, that explains it."""

    kind = "overheating"
    state_of = Watched
    unknown = "the GPU does not report its temperature, or not where it slows down"
    hold_s, clear_s = 60.0, 30.0

    def examine(self, device: Watched, seen: DeviceReading) -> Symptom | None:
        found = min(margins(seen.metrics), key=lambda margin: margin[1], default=None)
        if found is None:
            return None
        sensor, left_c, limit_c = found
        # The excess is 1 at the limit, and 0.5, which is RELEASE, RELEASE_CELSIUS below it.
        excess = max(0.0, 1.0 + (MARGIN_CELSIUS - left_c) / (2 * RELEASE_CELSIUS))
        text = (
            f"the {sensor} is at {limit_c - left_c:.0f} °C, {abs(left_c):.0f} °C "
            f"{'above' if left_c < 0 else 'below'} the {limit_c:.0f} °C at which the device slows "
            "down"
        )
        return Symptom(excess, text, limit_c - left_c, limit_c, limit_c - MARGIN_CELSIUS)


# A clock is a mean over a block; the device's usual clock is known after READY_BLOCKS.
BLOCK_S = 20.0
READY_BLOCKS = 4
# A block needs this many readings under load, and at least this share of them without a reason.
BLOCK_READINGS = 3
CLEAN_SHARE = 0.8
# A healthy GPU reaches its power limit now and then. A reason explains the clock only if it is
# active for more than this share of the time.
EXPLAINED_SHARE = 0.1
# If a block lacks readings under load after this many times BLOCK_S, it starts again.
MOST_BLOCKS = 3
# How fast the level follows a block above it and below it: it stays near the highest recent clock.
RISE, FALL = 0.5, 0.05


@dataclass(slots=True)
class ClockDevice(Watched):
    """A device with its usual clock under load (``level_hz``, from ``blocks`` blocks).

    begun: the start of the open block. clean, explained: its readings under load without and with
    a reason. sum_hz: the sum of the clocks without a reason. held_s: the total time that reasons
    have held clocks down, read at ``held_time``.
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
    """Detects a clock under load that is lower than usual without a reason.

    Reasons are the driver's (power, heat, clocks that were set) and heat itself.
    """

    kind = "clock_drop"
    state_of = ClockDevice
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
        return self._end_block(device, now) if full else None

    def _end_block(self, device: ClockDevice, now: float) -> Symptom | None:
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
        drop = max(0.0, 1 - block_hz / level_hz) if level_hz else 0.0
        excess = drop / MIN_DROP
        text = f"the SM clock under load is {block_hz / 1e6:.0f} MHz, usually {level_hz / 1e6:.0f}"
        if excess < RELEASE:
            # The level does not follow a larger drop.
            device.level_hz += (RISE if block_hz > level_hz else FALL) * (block_hz - level_hz)
        else:
            text = (
                f"the SM clock under load is {block_hz / 1e6:.0f} MHz, {100 * drop:.0f} % below "
                f"this GPU's usual {level_hz / 1e6:.0f} MHz, and the driver gives no reason"
            )
        return Symptom(excess, text, block_hz, level_hz, (1 - MIN_DROP) * level_hz)


def _begin(device: ClockDevice, now: float) -> None:
    device.begun, device.clean, device.explained, device.sum_hz = now, 0, 0, 0.0


def _held_share(device: ClockDevice, metrics: Metrics, now: float) -> float:
    """Return the share of the time since the last reading in which a reason was active."""
    total_s = sum(metrics.get(key, 0.0) for key in TIMED.values())
    grown_s, passed_s = total_s - device.held_s, now - device.held_time
    device.held_s, device.held_time = total_s, now
    return grown_s / passed_s if passed_s > 0 else 0.0


def _reasons(metrics: Metrics) -> bool | None:
    """Return whether a reason or heat holds clocks down now; None if reasons are unknown."""
    active = [value for key in ACTIVE.values() if (value := metrics.get(key)) is not None]
    return any(active) or is_too_hot(metrics) if active else None
