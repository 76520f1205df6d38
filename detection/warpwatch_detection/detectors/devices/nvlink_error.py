"""NVLinks that go down, recover, send again, or bring damaged packets at a rate."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_detection.detector import NEVER
from warpwatch_detection.detectors.devices.hysteresis import CounterGrowth, Hysteresis, Symptom
from warpwatch_detection.detectors.devices.series import Metrics, series
from warpwatch_detection.detectors.devices.watch import DeviceWatch, Watched
from warpwatch_telemetry.anomalies import Severity
from warpwatch_telemetry.records import DeviceReading

# Any of these is found; the others are normal in small numbers (DCGM's health check).
GRAVE = {kind: series("nvlink_errors_total", kind) for kind in ("replay", "recovery")}
CRC = {kind: series("nvlink_errors_total", kind) for kind in ("crc_flit", "crc_data", "receive")}
# NVML knows at most so many (NVML_NVLINK_MAX_LINKS).
LINKS = tuple(series("nvlink_link_up", str(link)) for link in range(18))
# Where DCGM's health check warns.
CRC_PER_SECOND = 100.0
CRC_WINDOW_S = 60.0
# How long no further grave error may come for it to be over.
QUIET_S = 600.0
# How long a link that was up must be down.
DOWN_S = 10.0


@dataclass(slots=True)
class NvlinkDevice(Watched):
    """up: links that were seen up; down: of those, the ones that are not now; outage: how long.

    grave: counts by type; fresh: new ones by type since it was last quiet; erred: the newest.
    """

    up: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    outage: Hysteresis = field(default_factory=Hysteresis)
    grave: dict[str, CounterGrowth] = field(default_factory=dict)
    fresh: dict[str, float] = field(default_factory=dict)
    erred: float = -NEVER
    crc: dict[str, CounterGrowth] = field(default_factory=dict)
    crc_per_second: float = 0.0


class NvlinkError(DeviceWatch[NvlinkDevice]):
    """Links that never were up are not connected."""

    kind = "nvlink_error"
    device_type = NvlinkDevice
    unknown = "the GPU has no NVLinks, or does not report them"
    clear_s = DOWN_S

    def examine(self, device: NvlinkDevice, seen: DeviceReading) -> Symptom | None:
        metrics, now = seen.metrics, seen.time
        known = self._watch_links(device, metrics, now)
        known |= _count_grave(device, metrics, now)
        known |= _count_crc(device, metrics, now)
        if not known:
            return None
        if device.outage.found:
            return Symptom(1.0, float(len(device.down)), float(len(device.up)))
        if device.fresh:
            return Symptom(1.0, sum(device.fresh.values()), 0.0, 1.0)
        rate = device.crc_per_second
        return Symptom(rate / CRC_PER_SECOND, rate, None, CRC_PER_SECOND)

    def _watch_links(self, device: NvlinkDevice, metrics: Metrics, now: float) -> bool:
        if LINKS[0] not in metrics and not any(key in metrics for key in LINKS):
            return False
        states = {link: metrics[key] for link, key in enumerate(LINKS) if key in metrics}
        device.up = sorted({*device.up, *(link for link, up in states.items() if up)})
        device.down = [link for link in device.up if states.get(link, 1.0) == 0]
        down = Symptom(float(bool(device.down)))
        device.outage.follow(now, down, DOWN_S, 0.0)
        return True

    def severity(self, device: NvlinkDevice) -> Severity:
        """Without a link collectives fail, or go on at a part of their speed."""
        return "critical" if device.outage.found or "recovery" in device.fresh else "warning"

    def describe(self, device: NvlinkDevice) -> str:
        if device.outage.found:
            links = ", ".join(map(str, device.down))
            return f"{len(device.down)} of {len(device.up)} NVLinks are down: {links}"
        if device.fresh:
            counts = " and ".join(f"{count:.0f} {kind}" for kind, count in device.fresh.items())
            return f"NVLink errors: {counts} since the links were last quiet"
        rate = f"{device.crc_per_second:.3g} NVLink CRC errors a second"
        return f"{rate} (limit {CRC_PER_SECOND:g})"


def _count_grave(device: NvlinkDevice, metrics: Metrics, now: float) -> bool:
    known = False
    for kind, key in GRAVE.items():
        total = metrics.get(key)
        if total is None:
            continue
        known = True
        counter = device.grave.get(kind) or device.grave.setdefault(kind, CounterGrowth())
        if grown := counter.take(total):
            device.fresh[kind] = device.fresh.get(kind, 0.0) + grown
            device.erred = now
    if device.fresh and not 0 <= now - device.erred < QUIET_S:
        device.fresh.clear()
    return known


def _count_crc(device: NvlinkDevice, metrics: Metrics, now: float) -> bool:
    rates = []
    for kind, key in CRC.items():
        total = metrics.get(key)
        if total is not None:
            growth = device.crc.get(kind) or device.crc.setdefault(kind, CounterGrowth())
            rates.append(growth.add(now, total, CRC_WINDOW_S) / CRC_WINDOW_S)
    if rates:
        device.crc_per_second = max(rates)
    return bool(rates)
