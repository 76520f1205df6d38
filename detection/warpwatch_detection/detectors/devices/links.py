"""Finds links that are slow, down or erroneous: PCIe, NVLink, and ports of RDMA devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from warpwatch_detection.detector import NEVER, STALE_S
from warpwatch_detection.detectors.devices.watch import (
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
# The window of all rates.
MINUTE_S = 60.0
# An idle link lowers its generation to save power, so the link is evaluated under load only. It is
# read every 30 s, so HOLD_S spans three readings.
MIN_UTILIZATION = 0.2
HOLD_S = 90.0


@dataclass(slots=True)
class PcieDevice(Watched):
    """A device with its PCIe link. link: the symptom of its speed under load."""

    link: Hysteresis = field(default_factory=Hysteresis)
    replays: CounterGrowth = field(default_factory=CounterGrowth)


def rates_of(
    counts: dict[str, CounterGrowth], totals: Mapping[str, float | None], now: float
) -> dict[str, float]:
    """Return the growth per second of each known counter, by type."""
    rates = {}
    for kind, total in totals.items():
        if total is not None:
            growth = counts.get(kind) or counts.setdefault(kind, CounterGrowth())
            rates[kind] = growth.add(now, total, MINUTE_S) / MINUTE_S
    return rates


class PcieDegraded(DeviceWatch[PcieDevice]):
    kind = "pcie_degraded"
    state_of = PcieDevice
    unknown = "the GPU has reported neither its PCIe link under load nor its replays"
    clear_s = 30.0

    def examine(self, device: PcieDevice, seen: DeviceReading) -> Symptom | None:
        link = self._link(device.link, seen.metrics, seen.time)
        replays = seen.metrics.get(REPLAYS)
        if replays is None:
            return link
        rate = device.replays.add(seen.time, replays, MINUTE_S)
        excess = rate / REPLAYS_PER_MINUTE
        if link is not None and link.excess >= excess:
            return link
        text = f"{rate:.1f} PCIe packets a minute are sent again "
        text += f"(normal: up to {REPLAYS_PER_MINUTE:g})"
        return Symptom(excess, text, rate, limit=REPLAYS_PER_MINUTE)

    def _link(self, link: Hysteresis, metrics: Metrics, now: float) -> Symptom | None:
        """Return a symptom of a slow link; None if its speed under load is unknown."""
        busy = utilization(metrics)
        if busy is not None and busy < MIN_UTILIZATION:
            link.interrupt()
        elif busy is not None and (slow := _speed(metrics)):
            link.follow(now, slow, HOLD_S, 0.0)
        if not 0 <= now - link.judged <= STALE_S:
            # After so long without load its speed is no longer known.
            link.end()
        if not link.text:
            return None
        return Symptom(float(link.found), link.text, link.value, link.baseline, link.limit)


def _speed(metrics: Metrics) -> Symptom | None:
    """Return the symptom of generation or width, whichever is further below its maximum."""
    found: list[tuple[float, Symptom]] = []
    for now, highest, words in (
        (GENERATION, GENERATION_MAX, "as generation {:.0f} of {:.0f}"),
        (WIDTH, WIDTH_MAX, "on {:.0f} of {:.0f} lanes"),
    ):
        value, maximum = metrics.get(now), metrics.get(highest)
        if value and maximum:
            text = f"under load the PCIe link runs {words.format(value, maximum)}"
            slow = Symptom(float(value < maximum), text, value, maximum, maximum)
            found.append((value / maximum, slow))
    return min(found, key=lambda one: one[0], default=(1.0, None))[1]


# One of these errors is a fault; the others are normal in small numbers (DCGM's health check).
GRAVE = {kind: series("nvlink_errors_total", kind) for kind in ("replay", "recovery")}
CRC = {kind: series("nvlink_errors_total", kind) for kind in ("crc_flit", "crc_data", "receive")}
# NVML supports at most 18 links (NVML_NVLINK_MAX_LINKS).
LINKS = tuple(series("nvlink_link_up", str(link)) for link in range(18))
# DCGM's health check warns at this rate.
CRC_PER_SECOND = 100.0
# The anomaly is over after this time without a grave error.
QUIET_S = 600.0
# A link that was up is found after it was down for this time.
DOWN_S = 10.0


@dataclass(slots=True)
class NvlinkDevice(Watched):
    """A device with its NVLinks.

    up: the links that have been up. outage: the symptom that some of these are down. grave, crc:
    counters by type. fresh: new grave errors by type since the links were last quiet. erred: the
    time of the newest grave error.
    """

    up: list[int] = field(default_factory=list)
    outage: Hysteresis = field(default_factory=Hysteresis)
    grave: dict[str, CounterGrowth] = field(default_factory=dict)
    fresh: dict[str, float] = field(default_factory=dict)
    erred: float = -NEVER
    crc: dict[str, CounterGrowth] = field(default_factory=dict)
    crc_per_second: float = 0.0


class NvlinkError(DeviceWatch[NvlinkDevice]):
    """Detects NVLinks that are down or have errors; a link that was never up is not connected."""

    kind = "nvlink_error"
    state_of = NvlinkDevice
    unknown = "the GPU has no NVLinks, or does not report them"
    clear_s = DOWN_S

    def examine(self, device: NvlinkDevice, seen: DeviceReading) -> Symptom | None:
        """Return the gravest symptom; with a missing link collectives fail or are slow."""
        metrics, now, outage = seen.metrics, seen.time, device.outage
        known = self._watch_links(device, metrics, now)
        known |= _count_grave(device, metrics, now)
        rates = rates_of(device.crc, {kind: metrics.get(key) for kind, key in CRC.items()}, now)
        if rates:
            device.crc_per_second = max(rates.values())
        if not (known or rates):
            return None
        if outage.found:
            return Symptom(1.0, outage.text, outage.value, outage.baseline, severity="critical")
        if device.fresh:
            counts = " and ".join(f"{count:.0f} {kind}" for kind, count in device.fresh.items())
            text = f"NVLink errors: {counts} since the links were last quiet"
            severity: Severity = "critical" if "recovery" in device.fresh else "warning"
            return Symptom(1.0, text, sum(device.fresh.values()), 0.0, 1.0, severity)
        rate = device.crc_per_second
        text = f"{rate:.3g} NVLink CRC errors a second (limit {CRC_PER_SECOND:g})"
        return Symptom(rate / CRC_PER_SECOND, text, rate, limit=CRC_PER_SECOND)

    def _watch_links(self, device: NvlinkDevice, metrics: Metrics, now: float) -> bool:
        states = {link: metrics[key] for link, key in enumerate(LINKS) if key in metrics}
        if not states:
            return False
        device.up = sorted({*device.up, *(link for link, up in states.items() if up)})
        down = [link for link in device.up if states.get(link, 1.0) == 0]
        text = f"{len(down)} of {len(device.up)} NVLinks are down: {', '.join(map(str, down))}"
        symptom = Symptom(float(bool(down)), text, float(len(down)), float(len(device.up)))
        device.outage.follow(now, symptom, DOWN_S, 0.0)
        return True


def _count_grave(device: NvlinkDevice, metrics: Metrics, now: float) -> bool:
    """Add the grave errors. Return whether the device reports any of their counters."""
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


CLEAR_S = 30.0
# The most errors per second by type; 0 for grave errors, which are remembered for QUIET_S.
LIMITS = {file.rpartition("/")[2]: limit for file, limit in ERRORS.items()}


@dataclass(slots=True)
class PortDevice(Watched):
    """A network port.

    was_up: whether the link was ever up. counts: errors by type. grave, grave_time: the type and
    time of the newest grave error.
    """

    was_up: bool = False
    counts: dict[str, CounterGrowth] = field(default_factory=dict)
    grave: str = ""
    grave_time: float = -NEVER


def _key(name: str, port: str, *labels: str) -> SeriesKey:
    return f"network_port_{name}", (*port.split("/"), *labels)


class NetworkLinkDown(DeviceWatch[PortDevice]):
    """Detects ports that are down; a port that was never up is not connected."""

    kind = "network_link_down"
    state_of = PortDevice
    reads = (PortReading,)
    unknown = "no port of a network device that was up"
    clear_s = CLEAR_S
    # A link that is retrained is down for some seconds; gpud counts a flap from 25 s on.
    hold_s = 25.0
    # Collectives over the port fail for every job.
    severity = "critical"

    def examine(self, device: PortDevice, seen: DeviceReading) -> Symptom | None:
        up = seen.metrics.get(_key("up", seen.device))
        device.was_up |= bool(up)
        if up is None or not device.was_up:
            return None
        text = f"the network port {seen.device} is {'up' if up else 'down'}"
        return Symptom(1.0 - up, text, up, 1.0)


class NetworkErrors(DeviceWatch[PortDevice]):
    """Detects errors of a port since the first reading, whose counts are old."""

    kind = "network_errors"
    state_of = PortDevice
    reads = (PortReading,)
    unknown = "no port of a network device that counts errors"
    clear_s = CLEAR_S

    def examine(self, device: PortDevice, seen: DeviceReading) -> Symptom | None:
        keys = {kind: _key("errors_total", seen.device, kind) for kind in LIMITS}
        totals = {kind: seen.metrics.get(key) for kind, key in keys.items()}
        rates = rates_of(device.counts, totals, seen.time)
        if not rates:
            return None
        worst, text = 0.0, "no errors of the network port lately"
        for kind, per_second in rates.items():
            limit = LIMITS[kind]
            if limit == 0 and per_second > 0:
                device.grave, device.grave_time = kind, seen.time
            elif limit and per_second / limit > worst:
                worst = per_second / limit
                text = f"{per_second:.3g} {kind} a second at the network port {seen.device}"
                text += f" (limit {limit:.3g})"
        if 0 <= seen.time - device.grave_time < QUIET_S:
            text = f"{device.grave} was counted at the network port {seen.device}"
            return Symptom(1.0, text, 1.0, 0.0, 1.0)
        return Symptom(worst, text, worst, limit=1.0)
