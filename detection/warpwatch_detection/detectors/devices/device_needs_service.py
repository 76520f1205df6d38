"""Finds GPUs that need a reset, a reboot or a replacement, until they are healthy after it.

The driver asks for it, or an XID requires it. The GPU was serviced if the driver no longer asks,
node or driver were restarted, or the count of errors fell. Only then can it be healthy again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from warpwatch_detection.detector import NEVER, Cleared, DetectorResult, DetectorStatus, Results
from warpwatch_detection.detectors.devices.watch import DeviceDetector, Watched, series
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.records import DeviceReading
from warpwatch_telemetry.xids import XIDS, explain

RECOVERY_ACTION = series("recovery_action")
# Counted since the driver was loaded, or the GPU was reset.
ERRORS = series("ecc_errors_total", "uncorrected")
COUNTS = {n: series("xid_errors_total", str(n)) for n, xid in XIDS.items() if xid.needs}
TIMES = {number: series("xid_last_timestamp_seconds", str(number)) for number in COUNTS}
_SERIES = {*COUNTS.values(), *TIMES.values()}
# nvml.h: NVML_GPU_RECOVERY_ACTION_*.
ACTIONS = {
    1: "a reset",
    2: "a reboot of the node",
    3: "a drain of peer-to-peer work",
    4: "a drain and a reset",
}
RESET_REQUIRED = "reset_required"
REFUSES = "a reset, without which it does not use the GPU"
# From the least need to the most.
NEEDS = ("", "reset", "reboot", "replacement")
# An XID that is this old was reported before the daemon started.
OLD_S = 60.0
# Parts of GPUs, and devices whose UUID was never read.
NO_GPUS = ("MIG-", "unknown-")


@dataclass(slots=True)
class ServedDevice(Watched):
    """A device, and the reason why it needs service (if ``hysteresis.found``).

    xid: the gravest XID that requires service. ask: the service that the driver asks for. waived:
    an ask that an operator has resolved. counts: by XID. settled: the time until which XIDs are
    handled. served: whether it was reset or rebooted since. driver_load, slot: as in a reading.
    errors: the newest count of errors.
    """

    xid: int | None = None
    ask: str = ""
    waived: str = ""
    counts: dict[int, float] = field(default_factory=dict)
    settled: float = -NEVER
    served: bool = False
    driver_load: str = ""
    slot: str = ""
    errors: float = 0.0

    @property
    def asks(self) -> bool:
        return bool(self.ask) and self.ask != self.waived

    @property
    def sentence(self) -> str:
        xid = explain(self.xid or 0)
        said = [f"XID {xid.number} ({xid.name}), needs a {xid.needs}"] if self.xid else []
        return "; ".join([*said, *([f"the driver asks for {self.ask}"] if self.asks else [])])


class DeviceNeedsService(DeviceDetector[ServedDevice]):
    kind = "device_needs_service"
    device_type = ServedDevice

    def observe(self, seen: Any) -> Results:
        if seen.device.startswith(NO_GPUS):
            return ()
        device = self.device(seen.device)
        results = list(self._end_replaced(seen)) if seen.slot else []
        before = device.sentence
        self._note_service(device, seen)
        self._note_ask(device, seen)
        xid = _fresh_xid(device, seen)
        if xid is not None:
            device.served = False
            if device.xid is None or _need(xid) > _need(device.xid):
                device.xid = xid
        device.seen = seen.time
        if seen.up and device.served and not device.asks and device.hysteresis.found:
            results.append(self.resolve(seen.device, seen.time))
        elif device.xid is not None or device.asks:
            device.hysteresis.found = True
            if device.sentence != before:
                found = Detected(seen.time, "critical", device.sentence, device=seen.device)
                results.append(found)
        return results

    def resolve(self, device: str, now: float) -> Cleared:
        """Forget the present needs; the same need later is another fault."""
        known = self.device(device)
        known.xid, known.waived, known.served = None, known.ask, False
        known.settled = max(now, known.settled)
        known.hysteresis.found = False
        return Cleared(now, device=device, for_good=True)

    def _end_replaced(self, seen: DeviceReading) -> Iterator[DetectorResult]:
        """Resolve the needs of another device that was in the same slot."""
        devices: dict[str, ServedDevice] = self.state.devices
        for uuid, other in devices.items():
            if other.slot == seen.slot and uuid != seen.device and other.hysteresis.found:
                yield self.resolve(uuid, seen.time)

    def _note_service(self, device: ServedDevice, seen: DeviceReading) -> None:
        """Note signs of a reset or reboot, and the values that will show later ones."""
        errors = seen.metrics.get(ERRORS, device.errors)
        device.served |= errors < device.errors or _is_other(device.driver_load, seen.driver_load)
        device.errors = errors
        device.driver_load = seen.driver_load or device.driver_load
        device.slot = seen.slot or device.slot

    def _note_ask(self, device: ServedDevice, seen: DeviceReading) -> None:
        action, before = seen.metrics.get(RECOVERY_ACTION), device.ask
        if not seen.up and seen.reason == RESET_REQUIRED:
            device.ask = REFUSES
        elif action is not None:
            device.ask = ACTIONS.get(int(action), f"action {action:g}") if action else ""
        elif seen.up and before == REFUSES:
            device.ask = ""
        if device.ask != device.waived:
            device.waived = ""
        # The driver asks until the service is done.
        device.served |= bool(before) and not device.ask

    def statuses(self) -> Iterable[DetectorStatus]:
        for uuid, device in self.state.devices.items():
            found = device.hysteresis.found
            text = device.sentence if found else "neither the driver nor an XID asks for service"
            yield DetectorStatus("found" if found else "fine", text, device=uuid)


def _fresh_xid(device: ServedDevice, seen: DeviceReading) -> int | None:
    """Return the gravest new XID after which a GPU needs service."""
    metrics, first = seen.metrics, device.seen == -NEVER
    if metrics.keys().isdisjoint(_SERIES):
        return None
    fine = seen.up and metrics.get(RECOVERY_ACTION) == 0
    fresh, settled = set(), device.settled
    for number, key in COUNTS.items():
        time, count = metrics.get(TIMES[number]), metrics.get(key)
        if time is not None and time > settled:
            # A driver that has the recovery action and asks for nothing has dealt with an old one.
            if not (fine and time < seen.time - OLD_S):
                fresh.add(number)
            device.settled = max(device.settled, time)
        if count is not None and count != device.counts.get(number):
            if count > device.counts.get(number, 0.0) and not first:
                fresh.add(number)
            device.counts[number] = count
    return max(fresh, key=_need, default=None)


def _need(xid: int) -> int:
    return NEEDS.index(explain(xid).needs)


def _is_other(before: str, now: str) -> bool:
    """Return whether node or driver were started again; an unknown part is ignored."""
    parts = zip(before.split("/"), now.split("/"), strict=False)
    return bool(before and now) and any(old != new for old, new in parts)
