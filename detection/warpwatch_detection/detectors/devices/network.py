"""Ports of RDMA devices that go down, and errors beyond what they put right by themselves."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_detection.detector import NEVER
from warpwatch_detection.detectors.devices.hysteresis import CounterGrowth, Symptom
from warpwatch_detection.detectors.devices.watch import DeviceWatch, Watched
from warpwatch_telemetry.label_values import ERRORS
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import DeviceReading, PortReading

CLEAR_S = 30.0
# Of the rate of errors. A single grave one is remembered for so long.
WINDOW_S = 60.0
QUIET_S = 600.0

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
    """A port that never was up is not connected."""

    kind = "network_link_down"
    device_type = PortDevice
    reads = (PortReading,)
    unknown = "no port of a network device that was up"
    clear_s = CLEAR_S
    # A link that is trained anew is away for some seconds; gpud counts a flap from 25 s on.
    hold_s = 25.0
    # Collectives over the port fail, whatever job comes next.
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
    """What the counters had at first is of their life, and no news."""

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
