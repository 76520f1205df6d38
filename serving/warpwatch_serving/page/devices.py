"""Devices with their live values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from warpwatch_runtime.quantities import NO_VALUE, ago, gibibytes, percent, sentence, text
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import Workload
from warpwatch_telemetry.state import State
from warpwatch_telemetry.xids import explain

MAX_DEVICES = 64
MAX_XIDS = 3
# A cap that the driver keeps all day is worth a word, but no alarm.
_ALARMING = frozenset({"hw_slowdown", "sw_thermal", "hw_thermal", "hw_power_brake"})
# Harmless reasons for lower clocks: no work, or a setting.
_HARMLESS = frozenset({"idle", "application_clocks", "display_clocks"})
_REASONS = {
    "sw_power_cap": "power cap",
    "hw_slowdown": "hardware slowdown",
    "sync_boost": "sync boost",
    "sw_thermal": "heat (driver)",
    "hw_thermal": "heat (hardware)",
    "hw_power_brake": "power brake",
}

Values = Mapping[SeriesKey, float]


@dataclass(frozen=True, slots=True)
class Gauge:
    """A gauge. filled: per cent of the bar; None if there is no bar."""

    shown: str
    detail: str = ""
    filled: float | None = None
    hot: bool = False


def gpu_names(state: State) -> dict[str, str]:
    """Return the names of GPUs by UUID."""
    return {sample.device.uuid: f"GPU {sample.device.index}" for sample in state.devices}


def users(state: State) -> dict[str, list[str]]:
    """Return the users of each device by its UUID: ranks, or pods according to the kubelet."""
    found: dict[str, list[str]] = {}
    for rank in state.ranks:
        if rank.device and rank.status in ("running", "stopped"):
            found.setdefault(rank.device, []).append(
                f"{text(rank.job, 40)} rank {text(rank.name, 24)}"
            )
    for origin in state.attributions:
        for uuid, workloads in origin.workloads.items():
            found.setdefault(uuid, [_named(workload) for workload in workloads])
    return found


def _named(workload: Workload) -> str:
    return f"{text(workload.namespace, 40)}/{text(workload.pod, 60)}"


def utilization(values: Values) -> Gauge:
    # A GPU instance has no utilization of the driver's, but may have GPM's.
    activity = values.get(("device_graphics_active_ratio", ()))
    ratio = values.get(("device_utilization_ratio", ()), activity)
    return Gauge(percent(ratio), filled=_filled(ratio, 1.0))


def xids(values: Values, now: float) -> tuple[str, ...]:
    """Return the meaning of each XID and what to do about it."""
    seen = {
        int(key[1][0]): time
        for key, time in values.items()
        if key[0] == "device_xid_last_timestamp_seconds"
    }
    newest = sorted(seen, key=lambda xid: -seen[xid])[:MAX_XIDS]
    return tuple(_explained(xid, ago(seen[xid], now)) for xid in newest)


def _explained(number: int, when: str) -> str:
    xid = explain(number)
    return sentence(f"XID {number}, {xid.name}, {when}: {xid.action}", 400)


def memory(values: Values) -> Gauge:
    used = values.get(("device_memory_used_bytes", ()))
    total = values.get(("device_memory_total_bytes", ()))
    filled = _filled(used, total)
    of = f"of {gibibytes(total)}" if total else ""
    return Gauge(gibibytes(used), of, filled, hot=filled is not None and filled > 95)


def power(values: Values) -> Gauge:
    watts = values.get(("device_power_watts", ()))
    limit = values.get(("device_power_limit_watts", ()))
    shown = NO_VALUE if watts is None else f"{watts:.0f} W"
    return Gauge(shown, f"of {limit:.0f} W" if limit else "", _filled(watts, limit))


def temperature(values: Values) -> Gauge:
    celsius = values.get(("device_temperature_celsius", ("gpu",)))
    slowdown = values.get(("device_temperature_threshold_celsius", ("slowdown",)))
    hot = celsius is not None and celsius >= (slowdown or 90.0) - 3
    return Gauge(NO_VALUE if celsius is None else f"{celsius:.0f} °C", hot=hot)


def clock(values: Values) -> Gauge:
    hertz = values.get(("device_clock_hertz", ("sm",)))
    top = values.get(("device_clock_max_hertz", ("sm",)))
    shown = NO_VALUE if hertz is None else f"{hertz / 1e6:.0f} MHz"
    return Gauge(shown, f"of {top / 1e6:.0f}" if top else "")


def throttling(values: Values) -> Gauge:
    known = {key[1][0]: on for key, on in values.items() if key[0] == "device_throttle_active"}
    active = [reason for reason, on in known.items() if on and reason not in _HARMLESS]
    if not known:
        return Gauge(NO_VALUE)
    if not active:
        return Gauge("none")
    shown = ", ".join(_REASONS.get(reason, text(reason)) for reason in active)
    return Gauge(shown, hot=not _ALARMING.isdisjoint(active))


def _filled(value: float | None, total: float | None) -> float | None:
    if value is None or not total:
        return None
    return round(100 * min(1.0, max(0.0, value / total)), 1)
