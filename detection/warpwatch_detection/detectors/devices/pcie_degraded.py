"""A PCIe link that is slower than device and slot allow, or that sends packets again and again."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_detection.detectors.devices.hysteresis import CounterGrowth, Hysteresis, Symptom
from warpwatch_detection.detectors.devices.series import Metrics, series, utilization
from warpwatch_detection.detectors.devices.watch import STALE_S, DeviceWatch, Watched
from warpwatch_telemetry.records import DeviceReading

GENERATION, GENERATION_MAX = series("pcie_link_generation"), series("pcie_link_generation_max")
WIDTH, WIDTH_MAX = series("pcie_link_width_lanes"), series("pcie_link_width_max_lanes")
REPLAYS = series("pcie_replay_total")
# The most that NVIDIA finds normal (DCGM's health check).
REPLAYS_PER_MINUTE = 8.0
MINUTE_S = 60.0
# An idle link saves power by its generation: it is judged under load alone, and read every 30 s.
MIN_UTILIZATION = 0.2
HOLD_S = 90.0


@dataclass(slots=True)
class PcieDevice(Watched):
    """link: of the link's speed alone; link_words: with a place for value and maximum.

    replays_count: more than the link, when they were last judged.
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
        """The speed of the link; None where it is not known, or nothing loads it."""
        link, busy = device.link, utilization(metrics)
        if busy is not None and busy < MIN_UTILIZATION:
            link.interrupt()
        elif busy is not None and (worst := _worst(metrics)):
            share, value, maximum, device.link_words = worst
            slow = Symptom(float(share < 1), value, maximum, maximum)
            link.follow(now, slow, HOLD_S, 0.0)
        if not 0 <= now - link.judged <= STALE_S:
            # No load since: its speed is not known any more.
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
    """Share of the maximum, value, maximum and words of what is further below its maximum."""
    found = None
    for now, highest, words in (
        (GENERATION, GENERATION_MAX, "as generation {:.0f} of {:.0f}"),
        (WIDTH, WIDTH_MAX, "on {:.0f} of {:.0f} lanes"),
    ):
        value, maximum = metrics.get(now), metrics.get(highest)
        if value and maximum and (found is None or value / maximum < found[0]):
            found = (value / maximum, value, maximum, words)
    return found
