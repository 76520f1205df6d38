"""A PCIe link that is slower than device and slot allow, or that sends packets again and again."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_detection.config_devices import PcieDegradedConfig
from warpwatch_detection.detector import NEVER
from warpwatch_detection.detectors.devices.hysteresis import CounterGrowth, Hysteresis, Symptom
from warpwatch_detection.detectors.devices.series import Metrics, series, utilization
from warpwatch_detection.detectors.devices.watch import STALE_S, DeviceWatch, Watched
from warpwatch_telemetry.records import DeviceReading

GENERATION, GENERATION_MAX = series("pcie_link_generation"), series("pcie_link_generation_max")
WIDTH, WIDTH_MAX = series("pcie_link_width_lanes"), series("pcie_link_width_max_lanes")
REPLAYS = series("pcie_replay_total")
MINUTE_S = 60.0


@dataclass(slots=True)
class PcieDevice(Watched):
    """link: the hysteresis of the link's speed alone, its words with a place for value and maximum.

    replays_count: more than the link, when they were last judged.
    """

    link: Hysteresis = field(default_factory=Hysteresis)
    replays: CounterGrowth = field(default_factory=CounterGrowth)
    link_words: str = ""
    replays_count: bool = False


@dataclass(slots=True)
class PcieState:
    devices: dict[str, PcieDevice] = field(default_factory=dict)
    deadline: float = NEVER


class PcieDegraded(DeviceWatch[PcieDevice]):
    """The link is judged under load alone: an idle one is slow to save power."""

    kind = "pcie_degraded"
    unknown = "the GPU has told neither its PCIe link under load nor its replays"

    def __init__(self, config: PcieDegradedConfig) -> None:
        super().__init__(PcieState(), PcieDevice)
        self._config = config
        self.clear_s = config.clear_s

    def examine(self, device: PcieDevice, seen: DeviceReading) -> Symptom | None:
        link = self._link(device, seen.metrics, seen.time)
        device.replays_count = False
        replays = seen.metrics.get(REPLAYS)
        if replays is None:
            return link
        rate = device.replays.add(seen.time, replays, MINUTE_S)
        limit = self._config.replays_per_minute
        if link is not None and link.excess >= rate / limit:
            return link
        device.replays_count = True
        return Symptom(rate / limit, rate, None, limit)

    def _link(self, device: PcieDevice, metrics: Metrics, now: float) -> Symptom | None:
        """The speed of the link; None where it is not known, or nothing loads it."""
        hysteresis, busy = device.link, utilization(metrics)
        if busy is not None and busy < self._config.min_utilization:
            hysteresis.interrupt()
        elif busy is not None and (worst := _worst(metrics)):
            share, value, maximum, device.link_words = worst
            slow = Symptom(float(share < 1), value, maximum, maximum)
            hysteresis.follow(now, slow, self._config.hold_s, 0.0)
        if not 0 <= now - hysteresis.judged <= STALE_S:
            # No load since: nobody knows.
            hysteresis.end()
        if not hysteresis.known:
            return None
        return Symptom(
            float(hysteresis.found), hysteresis.value, hysteresis.baseline, hysteresis.limit
        )

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
