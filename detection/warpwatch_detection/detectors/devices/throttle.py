"""Detects clocks held down by heat or by power, by any one of three signs.

The driver counts the time of a reason, it reports the present reasons (the state), and the clock
itself falls. A counter may stand still although its reason holds, so the others are read too. The
software power cap is ignored: with it a healthy, busy GPU keeps its power limit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from warpwatch_detection.detectors.devices.watch import (
    CounterGrowth,
    DeviceWatch,
    Metrics,
    Symptom,
    Watched,
    is_loaded,
    series,
)
from warpwatch_telemetry.anomalies import Severity
from warpwatch_telemetry.metric import SeriesKey
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
_ACTIVE = {
    reason: series("throttle_active", reason)
    for reason in ("sw_thermal", "hw_thermal", "hw_power_brake", HW_SLOWDOWN)
}
# Other reasons for a low clock of a hot GPU: set limits, and idling.
_EXPLAINING = tuple(
    series("throttle_active", reason)
    for reason in ("idle", "application_clocks", "sw_power_cap", "sync_boost", "display_clocks")
)
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

    strict: a state must last, because the driver also counts the time, or does not report this
    reason. active_s: the time under load, by the states.
    """

    strict: bool = False
    counter: CounterGrowth = field(default_factory=CounterGrowth)
    states: CounterGrowth = field(default_factory=CounterGrowth)
    active_s: float = 0.0
    read_time: float | None = None
    counter_share: float = 0.0
    state_share: float = 0.0

    def read(self, now: float, total_s: float | None, active: bool | None) -> bool:
        """Add a reading. Return whether the counter or the state is known."""
        if total_s is not None:
            self.strict = True
            self.counter_share = _share(self.counter, now, total_s)
        if active is not None:
            if active and self.read_time is not None:
                self.active_s += min(STANDS_S, max(0.0, now - self.read_time))
            self.read_time = now
            self.state_share = _share(self.states, now, self.active_s)
        return self.read_time is not None or self.counter.last is not None

    @property
    def symptom(self) -> Symptom:
        """The symptom of counter or state, by the one that is further above its limit."""
        state_limit = MIN_CONTRADICTED_SHARE if self.strict else MIN_SHARE
        share, limit = self.counter_share, MIN_SHARE
        if self.state_share / state_limit > share / limit:
            share, limit = self.state_share, state_limit
        return Symptom(share / limit, share, None, limit)

    @property
    def words(self) -> str:
        state = f"state {self.state_share:.0%}"
        return state if self.counter.last is None else f"counter {self.counter_share:.0%}, {state}"


def _share(growth: CounterGrowth, now: float, total_s: float) -> float:
    return min(1.0, growth.add(now, total_s, WINDOW_S) / WINDOW_S)


@dataclass(slots=True)
class ThrottledDevice(Watched):
    """``worst``: the reason that is furthest above its limit; other values are the newest.

    cool_hz: the clock under load before the GPU was too hot; 0: not known.
    """

    reasons: dict[str, ThrottleReason] = field(default_factory=dict)
    worst: str = ""
    temperature_c: float | None = None
    clock_hz: float | None = None
    clock_max_hz: float | None = None
    cool_hz: float = 0.0


class Throttle(DeviceWatch[ThrottledDevice]):
    """Reports the worst of several reasons, as their times overlap."""

    # The series of each reason's time, and its words.
    timed: ClassVar[dict[str, SeriesKey]]
    words: ClassVar[dict[str, str]]
    unknown = "the GPU does not report why its clocks are held down"
    device_type = ThrottledDevice
    clear_s = WINDOW_S

    def examine(self, device: ThrottledDevice, seen: DeviceReading) -> Symptom | None:
        symptoms: dict[str, Symptom] = {}
        for name, total_s, active in self._signs(device, seen.metrics):
            reason = device.reasons.get(name)
            if reason is None:
                reason = device.reasons[name] = ThrottleReason(strict=name == CLOCK_ALONE)
            if reason.read(seen.time, total_s, active):
                symptoms[name] = reason.symptom
        if not symptoms:
            return None
        name = max(symptoms, key=lambda name: symptoms[name].excess)
        worst = symptoms[name]
        if worst.value or not device.worst:
            device.worst = name
        if worst.value:
            device.temperature_c = seen.metrics.get(TEMPERATURE)
            device.clock_hz = seen.metrics.get(CLOCK)
            device.clock_max_hz = seen.metrics.get(CLOCK_MAX)
        return worst

    def _signs(
        self, device: ThrottledDevice, metrics: Metrics
    ) -> Iterator[tuple[str, float | None, bool | None]]:
        """Yield each reason, the seconds that the driver counts, and its state under load."""
        loaded = is_loaded(metrics) is not False
        for name, key in self.timed.items():
            active = metrics.get(_ACTIVE[name])
            yield name, metrics.get(key), None if active is None else loaded and bool(active)

    def describe(self, device: ThrottledDevice) -> str:
        share = device.hysteresis.value or 0.0
        text = f"{self.words[device.worst]} {share * 100:.0f} % of the last {WINDOW_S:.0f} s"
        if not device.hysteresis.found:
            return text
        if device.temperature_c is not None:
            text += f", at {device.temperature_c:.0f} °C"
        if device.clock_hz and device.clock_max_hz:
            clock, highest = device.clock_hz / 1e6, device.clock_max_hz / 1e6
            text += f"; the SM clock is {clock:.0f} MHz of {highest:.0f} MHz"
        reasons = device.reasons.items()
        said = [f"{name} {reason.words}" for name, reason in reasons if name != CLOCK_ALONE]
        return f"{text}; the driver: {', '.join(said)}"


class ThermalThrottle(Throttle):
    kind = "thermal_throttle"
    state_version = 2
    timed: ClassVar = {
        reason: series("throttle_seconds_total", reason) for reason in ("hw_thermal", "sw_thermal")
    }
    words: ClassVar = {
        "hw_thermal": "heat made the hardware cut clocks (hw_thermal) during",
        "sw_thermal": "heat held clocks down (sw_thermal) during",
        CLOCK_ALONE: "too hot, and the SM clock low under load, during",
    }

    def severity(self, device: ThrottledDevice) -> Severity:
        """Return critical for the hardware's protection, which at least halves clocks."""
        return "critical" if device.worst == "hw_thermal" else "warning"

    def _signs(
        self, device: ThrottledDevice, metrics: Metrics
    ) -> Iterator[tuple[str, float | None, bool | None]]:
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
    timed: ClassVar = {"hw_power_brake": series("throttle_seconds_total", "hw_power_brake")}
    words: ClassVar = {
        "hw_power_brake": "the power brake held clocks down (hw_power_brake) during",
        HW_SLOWDOWN: "power made the hardware cut clocks (hw_slowdown) during",
    }

    def _signs(
        self, device: ThrottledDevice, metrics: Metrics
    ) -> Iterator[tuple[str, float | None, bool | None]]:
        yield from super()._signs(device, metrics)
        slowed, hot = metrics.get(_ACTIVE[HW_SLOWDOWN]), metrics.get(_ACTIVE["hw_thermal"])
        if slowed is not None and hot is not None:
            cool = not hot and not is_too_hot(metrics)
            yield HW_SLOWDOWN, None, bool(slowed) and cool and is_loaded(metrics) is not False


def _is_slow_by_heat(device: ThrottledDevice, metrics: Metrics) -> bool | None:
    """Return whether only heat explains a low clock; None if clock or load is unknown."""
    clock_hz, reasons = metrics.get(CLOCK), [metrics.get(key) for key in _EXPLAINING]
    if clock_hz is None or is_loaded(metrics) is None or None in reasons:
        return None
    if not is_loaded(metrics) or any(reasons):
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


@dataclass(slots=True)
class HotDevice(Watched):
    """A device with the sensor that is nearest to its threshold."""

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
        # The excess is 1 at the limit, and 0.5, which is RELEASE, RELEASE_CELSIUS below it.
        excess = max(0.0, 1.0 + (MARGIN_CELSIUS - left_c) / (2 * RELEASE_CELSIUS))
        return Symptom(excess, limit_c - left_c, limit_c, limit_c - MARGIN_CELSIUS)

    def describe(self, device: HotDevice) -> str:
        value, limit = device.hysteresis.value or 0.0, device.hysteresis.baseline or 0.0
        side = "above" if value > limit else "below"
        return (
            f"the {device.sensor} is at {value:.0f} °C, {abs(limit - value):.0f} °C {side} the "
            f"{limit:.0f} °C at which the device slows down"
        )
