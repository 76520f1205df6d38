"""Finds links that are slow, down or erroneous: PCIe, NVLink, and ports of RDMA devices."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_detection.detector import NEVER
from warpwatch_detection.detectors.devices.watch import (
    STALE_S,
    CounterGrowth,
    DeviceWatch,
    Hysteresis,
    Metrics,
    Symptom,
    Watched,
    series,
    utilization,
)
from warpwatch_telemetry.anomalies import Severity
from warpwatch_telemetry.catalogue import ERRORS
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import DeviceReading, PortReading

GENERATION, GENERATION_MAX = series("pcie_link_generation"), series("pcie_link_generation_max")
WIDTH, WIDTH_MAX = series("pcie_link_width_lanes"), series("pcie_link_width_max_lanes")
REPLAYS = series("pcie_replay_total")
# DCGM's health check accepts up to this rate.
REPLAYS_PER_MINUTE = 8.0
MINUTE_S = 60.0
# An idle link lowers its generation to save power, so the link is evaluated under load only. As it
# is read every 30 s, HOLD_S spans three readings.
MIN_UTILIZATION = 0.2
HOLD_S = 90.0


@dataclass(slots=True)
class PcieDevice(Watched):
    """link: the symptom of the link's speed; link_words: its text, with value and maximum to fill.

    replays_count: the newest symptom is that of the replays, not of the link.
    """

    link: Hysteresis = field(default_factory=Hysteresis)
    replays: CounterGrowth = field(default_factory=CounterGrowth)
    link_words: str = ""
    replays_count: bool = False


class PcieDegraded(DeviceWatch[PcieDevice]):
    kind = "pcie_degraded"
    device_type = PcieDevice
    unknown = "the GPU has reported neither its PCIe link under load nor its replays"
    clear_s = 30.0

    def examine(self, device: PcieDevice, seen: DeviceReading) -> Symptom | None:
        link = self._link(device, seen.metrics, seen.time)
        device.replays_count = False
        replays = seen.metrics.get(REPLAYS)
        if replays is None:
            return link
        rate = device.replays.add(seen.time, replays, MINUTE_S)
        excess = rate / REPLAYS_PER_MINUTE
        if link is not None and link.excess >= excess:
            return link
        device.replays_count = True
        return Symptom(excess, rate, None, REPLAYS_PER_MINUTE)

    def _link(self, device: PcieDevice, metrics: Metrics, now: float) -> Symptom | None:
        """Return a symptom of a slow link; None if its speed under load is unknown."""
        link, busy = device.link, utilization(metrics)
        if busy is not None and busy < MIN_UTILIZATION:
            link.interrupt()
        elif busy is not None and (worst := _worst(metrics)):
            share, value, maximum, device.link_words = worst
            slow = Symptom(float(share < 1), value, maximum, maximum)
            link.follow(now, slow, HOLD_S, 0.0)
        if not 0 <= now - link.judged <= STALE_S:
            # Without load for so long its speed is no longer known.
            link.end()
        if not link.known:
            return None
        return Symptom(float(link.found), link.value, link.baseline, link.limit)

    def describe(self, device: PcieDevice) -> str:
        hysteresis = device.hysteresis
        if device.replays_count:
            return (
                f"{hysteresis.value or 0.0:.1f} PCIe packets a minute are sent again "
                f"(normal: up to {hysteresis.limit or 0.0:g})"
            )
        link = device.link_words.format(hysteresis.value, hysteresis.baseline)
        return f"under load the PCIe link runs {link}"


def _worst(metrics: Metrics) -> tuple[float, float, float, str] | None:
    """Return share, value, maximum and words of generation or width, by the lower share."""
    found = None
    for now, highest, words in (
        (GENERATION, GENERATION_MAX, "as generation {:.0f} of {:.0f}"),
        (WIDTH, WIDTH_MAX, "on {:.0f} of {:.0f} lanes"),
    ):
        value, maximum = metrics.get(now), metrics.get(highest)
        if value and maximum and (found is None or value / maximum < found[0]):
            found = (value / maximum, value, maximum, words)
    return found


# Any of these errors is found; the others are normal in small numbers (DCGM's health check).
GRAVE = {kind: series("nvlink_errors_total", kind) for kind in ("replay", "recovery")}
CRC = {kind: series("nvlink_errors_total", kind) for kind in ("crc_flit", "crc_data", "receive")}
# NVML supports at most 18 links (NVML_NVLINK_MAX_LINKS).
LINKS = tuple(series("nvlink_link_up", str(link)) for link in range(18))
# DCGM's health check warns at this rate.
CRC_PER_SECOND = 100.0
CRC_WINDOW_S = 60.0
# The anomaly is over after this time without a grave error.
QUIET_S = 600.0
# A link that was up is found after this time down.
DOWN_S = 10.0


@dataclass(slots=True)
class NvlinkDevice(Watched):
    """up: links that have been up; down: those of them that are down; outage: the symptom of these.

    grave: counters by type; fresh: new errors by type since it was last quiet; erred: the time of
    the newest.
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
    """Ignores links that have never been up: they are not connected."""

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
        """Return "critical" for a missing link, with which collectives fail or are slow."""
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
        if grown := counter.grow_to(total):
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


CLEAR_S = 30.0
# The window of the rate of errors. A single grave error is remembered for QUIET_S.
WINDOW_S = 60.0

LIMITS = {file.rpartition("/")[2]: limit for file, limit in ERRORS.items()}


@dataclass(slots=True)
class PortDevice(Watched):
    """was_up: whether the link was ever seen up; counts: by type; worst: type and a text of it."""

    was_up: bool = False
    counts: dict[str, CounterGrowth] = field(default_factory=dict)
    worst: str = ""
    grave: str = ""
    grave_time: float = -NEVER


def _key(name: str, port: str, *labels: str) -> SeriesKey:
    return f"network_port_{name}", (*port.split("/"), *labels)


class NetworkLinkDown(DeviceWatch[PortDevice]):
    """Ignores ports that have never been up: they are not connected."""

    kind = "network_link_down"
    device_type = PortDevice
    reads = (PortReading,)
    unknown = "no port of a network device that was up"
    clear_s = CLEAR_S
    # A link that is retrained is down for some seconds; gpud counts a flap from 25 s on.
    hold_s = 25.0
    # Collectives over the port fail for every job.
    usual_severity = "critical"

    def examine(self, device: PortDevice, seen: DeviceReading) -> Symptom | None:
        up = seen.metrics.get(_key("up", seen.device))
        if up is None:
            return None
        device.was_up |= bool(up)
        device.worst = seen.device
        return Symptom(1.0 - up, up, 1.0) if device.was_up else None

    def describe(self, device: PortDevice) -> str:
        state = "down" if device.hysteresis.value == 0 else "up"
        return f"the network port {device.worst} is {state}"


class NetworkErrors(DeviceWatch[PortDevice]):
    """Ignores the counts of the first reading, which are old."""

    kind = "network_errors"
    device_type = PortDevice
    reads = (PortReading,)
    unknown = "no port of a network device that counts errors"
    clear_s = CLEAR_S

    def examine(self, device: PortDevice, seen: DeviceReading) -> Symptom | None:
        worst, known = 0.0, False
        for kind, limit in LIMITS.items():
            total = seen.metrics.get(_key("errors_total", seen.device, kind))
            if total is None:
                continue
            known = True
            growth = device.counts.get(kind) or device.counts.setdefault(kind, CounterGrowth())
            per_second = growth.add(seen.time, total, WINDOW_S) / WINDOW_S
            if limit == 0 and per_second > 0:
                device.grave, device.grave_time = kind, seen.time
            elif limit and per_second / limit > worst:
                worst = per_second / limit
                device.worst = (
                    f"{per_second:.3g} {kind} a second at the network port {seen.device} "
                    f"(limit {limit:.3g})"
                )
        if not known:
            return None
        if 0 <= seen.time - device.grave_time < QUIET_S:
            device.worst = f"{device.grave} was counted at the network port {seen.device}"
            return Symptom(1.0, 1.0, 0.0, 1.0)
        return Symptom(worst, worst, None, 1.0)

    def describe(self, device: PortDevice) -> str:
        return device.worst or "no errors of the network port lately"
