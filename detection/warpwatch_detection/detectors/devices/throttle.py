"""Clocks held down by heat or by power: shares of time, from the driver's own counters.

A power cap in software is how a busy GPU keeps its limit: it is no fault and not judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from warpwatch_detection.detectors.devices.hysteresis import CounterGrowth, Symptom
from warpwatch_detection.detectors.devices.series import Metrics, series
from warpwatch_detection.detectors.devices.watch import DeviceWatch, Watched
from warpwatch_telemetry.anomalies import Severity
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import DeviceReading

TEMPERATURE = series("temperature_celsius", "gpu")
CLOCK, CLOCK_MAX = series("clock_hertz", "sm"), series("clock_max_hertz", "sm")
HW_SLOWDOWN = "hw_slowdown"
_ACTIVE = {
    reason: series("throttle_active", reason)
    for reason in ("sw_thermal", "hw_thermal", "hw_power_brake", HW_SLOWDOWN)
}
# A tenth of half a minute costs a job some per cent, and no single short peak counts.
MIN_SHARE = 0.10
# It is over once the share was below half of that for as long.
WINDOW_S = 30.0
# A state that was read stands for at most so long.
STANDS_S = 10.0


@dataclass(slots=True)
class ThrottleReason:
    """``counted``: the driver counts its time; else ``active_s`` does, by the states read."""

    growth: CounterGrowth = field(default_factory=CounterGrowth)
    counted: bool = False
    active_s: float = 0.0
    read_time: float | None = None


@dataclass(slots=True)
class ThrottledDevice(Watched):
    """``worst``: the reason with the largest share; the rest as read last."""

    reasons: dict[str, ThrottleReason] = field(default_factory=dict)
    worst: str = ""
    temperature_c: float | None = None
    clock_hz: float | None = None
    clock_max_hz: float | None = None


class Throttle(DeviceWatch[ThrottledDevice]):
    """The larger share of several reasons: their times overlap."""

    # The series of each reason's time, and its words.
    timed: ClassVar[dict[str, SeriesKey]]
    words: ClassVar[dict[str, str]]
    unknown = "the GPU does not report why its clocks are held down"
    device_type = ThrottledDevice
    clear_s = WINDOW_S

    def examine(self, device: ThrottledDevice, seen: DeviceReading) -> Symptom | None:
        shares: dict[str, float] = {}
        for name, total_s in self._totals(device, seen.metrics, seen.time):
            grown_s = device.reasons[name].growth.add(seen.time, total_s, WINDOW_S)
            shares[name] = min(1.0, grown_s / WINDOW_S)
        if not shares:
            return None
        device.worst = max(shares, key=lambda name: shares[name])
        share = shares[device.worst]
        if share:
            device.temperature_c = seen.metrics.get(TEMPERATURE)
            device.clock_hz = seen.metrics.get(CLOCK)
            device.clock_max_hz = seen.metrics.get(CLOCK_MAX)
        return Symptom(share / MIN_SHARE, share, None, MIN_SHARE)

    def _totals(
        self, device: ThrottledDevice, metrics: Metrics, now: float
    ) -> Iterator[tuple[str, float]]:
        """Seconds for which each reason has held clocks down so far, of those that are known."""
        for name, key in self.timed.items():
            reason = device.reasons.get(name) or device.reasons.setdefault(name, ThrottleReason())
            total_s = metrics.get(key)
            if total_s is not None:
                reason.counted = True
                yield name, total_s
            elif not reason.counted:
                active = metrics.get(_ACTIVE[name])
                if active is not None:
                    yield name, _integrate(reason, bool(active), now)

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
        return text


class ThermalThrottle(Throttle):
    kind = "thermal_throttle"
    timed: ClassVar = {
        reason: series("throttle_seconds_total", reason) for reason in ("hw_thermal", "sw_thermal")
    }
    words: ClassVar = {
        "hw_thermal": "heat made the hardware cut clocks (hw_thermal) during",
        "sw_thermal": "heat held clocks down (sw_thermal) during",
    }

    def severity(self, device: ThrottledDevice) -> Severity:
        """The hardware's own protection halves clocks or worse: cooling has failed."""
        return "critical" if device.worst == "hw_thermal" else "warning"


class PowerBrake(Throttle):
    """The brake that power supply or rack pull; also the hardware slowdown that heat is not the
    reason of, which has no counter: too much power drawn too quickly."""

    kind = "power_brake"
    timed: ClassVar = {"hw_power_brake": series("throttle_seconds_total", "hw_power_brake")}
    words: ClassVar = {
        "hw_power_brake": "the power brake held clocks down (hw_power_brake) during",
        HW_SLOWDOWN: "power made the hardware cut clocks (hw_slowdown) during",
    }

    def _totals(
        self, device: ThrottledDevice, metrics: Metrics, now: float
    ) -> Iterator[tuple[str, float]]:
        yield from super()._totals(device, metrics, now)
        slowed, hot = metrics.get(_ACTIVE[HW_SLOWDOWN]), metrics.get(_ACTIVE["hw_thermal"])
        if slowed is None or hot is None:
            return
        reason = device.reasons.setdefault(HW_SLOWDOWN, ThrottleReason())
        yield HW_SLOWDOWN, _integrate(reason, bool(slowed and not hot), now)


def _integrate(reason: ThrottleReason, active: bool, now: float) -> float:
    if active and reason.read_time is not None:
        reason.active_s += min(STANDS_S, max(0.0, now - reason.read_time))
    reason.read_time = now
    return reason.active_s
