"""What the detectors of devices have in common: one state a device, from reading to verdict."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import GenericAlias
from typing import Any, Generic, TypeVar

from warpwatch_detection.detector import (
    NEVER,
    Cleared,
    Detector,
    DetectorResult,
    DetectorStatus,
    Results,
)
from warpwatch_detection.detectors.devices.hysteresis import Hysteresis, Symptom
from warpwatch_telemetry.anomalies import Detected, Severity
from warpwatch_telemetry.records import DeviceReading

# Devices that are remembered; MIG devices get a new UUID whenever they are made.
MAX_DEVICES = 256
# How often what lasts is found again, with its newest numbers.
REPEAT_S = 10.0
# What was found and could not be judged for so long (no load, not read) counts as over.
STALE_S = 600.0


@dataclass(slots=True)
class Watched:
    """What every detector remembers of a device; times of its newest reading and finding."""

    seen: float = -NEVER
    found_time: float = -NEVER
    hysteresis: Hysteresis = field(default_factory=Hysteresis)


S = TypeVar("S")
D = TypeVar("D", bound=Watched)


@dataclass(slots=True)
class DeviceStates(Generic[S]):
    """The state of a detector that remembers devices, by UUID."""

    devices: dict[str, S] = field(default_factory=dict)


@dataclass(slots=True)
class WatchedStates(DeviceStates[S]):
    """``deadline``: when something may have become stale."""

    deadline: float = NEVER


class DeviceDetector(Detector, Generic[D]):
    """One state a device, in ``state.devices`` by UUID. device_type: what it remembers of one."""

    reads: tuple[type, ...] = (DeviceReading,)
    # What is said of a device that was never judged.
    unknown: str = "the device has not reported what is needed"
    device_type: Any

    def __init__(self) -> None:
        self.state: Any = DeviceStates()

    @property
    def state_form(self) -> Any:
        return GenericAlias(type(self.state), (self.device_type,))

    def device(self, uuid: str) -> D:
        """The state of one; where it is the first of too many, the longest unseen goes."""
        devices: dict[str, D] = self.state.devices
        device = devices.get(uuid)
        if device is None:
            if len(devices) >= MAX_DEVICES:
                old = min(devices, key=lambda u: (devices[u].hysteresis.found, devices[u].seen))
                del devices[old]
            device = devices[uuid] = self.device_type()
        return device


class DeviceWatch(DeviceDetector[D]):
    """A state of a device: found when it has lasted, over when it has been away.

    The state has a ``deadline`` besides: when something may have become stale.
    """

    hold_s: float = 0.0
    clear_s: float = 0.0
    stale_s: float = STALE_S
    waits = True
    usual_severity: Severity = "warning"

    def __init__(self) -> None:
        self.state = WatchedStates()

    @abstractmethod
    def examine(self, device: D, seen: DeviceReading) -> Symptom | None:
        """How the device is; None where the reading does not say it."""

    @abstractmethod
    def describe(self, device: D) -> str:
        """How it was when it was last judged, in one sentence with numbers."""

    def severity(self, device: D) -> Severity:
        return self.usual_severity

    def observe(self, seen: Any) -> Results:
        device = self.device(seen.device)
        symptom = self.examine(device, seen)
        device.seen = seen.time
        if symptom is None:
            return ()
        return self.follow(seen.device, device, symptom, seen.time, self.hold_s)

    def follow(
        self, uuid: str, device: D, symptom: Symptom, now: float, hold_s: float
    ) -> tuple[DetectorResult, ...]:
        hysteresis = device.hysteresis
        before = hysteresis.found
        if not hysteresis.follow(now, symptom, hold_s, self.clear_s):
            return (Cleared(now, device=uuid),) if before else ()
        if before and 0 <= now - device.found_time < REPEAT_S:
            return ()
        device.found_time = now
        self.state.deadline = min(self.state.deadline, now + self.stale_s)
        return (self._found(uuid, device, now),)

    def _found(self, uuid: str, device: D, now: float) -> Detected:
        return Detected(
            time=now,
            severity=self.severity(device),
            summary=self.describe(device),
            device=uuid,
            value=device.hysteresis.value,
            baseline=device.hysteresis.baseline,
        )

    def expire(self, now: float) -> Results:
        known = {uuid: device.hysteresis for uuid, device in self.state.devices.items()}
        found = {uuid: one for uuid, one in known.items() if one.found}
        stale = [uuid for uuid, one in found.items() if one.judged + self.stale_s <= now]
        for uuid in stale:
            found.pop(uuid).end()
        dues = (one.judged + self.stale_s for one in found.values())
        self.state.deadline = min(dues, default=NEVER)
        return [Cleared(now, device=uuid) for uuid in stale]

    def statuses(self) -> Iterable[DetectorStatus]:
        for uuid, device in self.state.devices.items():
            hysteresis = device.hysteresis
            if not hysteresis.known:
                yield DetectorStatus("learning", self.unknown, device=uuid)
                continue
            yield DetectorStatus(
                "found" if hysteresis.found else "fine",
                self.describe(device),
                device=uuid,
                value=hysteresis.value,
                baseline=hysteresis.baseline,
                limit=hysteresis.limit,
                nearest=hysteresis.nearest,
            )


class DeviceEvents(DeviceDetector[D]):
    """Something that happens to a device; the engine holds it for ``hold_s`` after the last."""

    def __init__(self, hold_s: float) -> None:
        super().__init__()
        self._hold_s = hold_s

    def lasts(self, device: D, now: float) -> bool:
        """Whether what was found last is still held."""
        return 0 <= now - device.found_time <= self._hold_s

    @abstractmethod
    def examine(self, device: D, seen: DeviceReading) -> Detected | None:
        """What has happened since the reading before."""

    @abstractmethod
    def explain(self, uuid: str, device: D) -> DetectorStatus | None:
        """How the device is; None where that is not known."""

    def observe(self, seen: Any) -> Results:
        device = self.device(seen.device)
        found = self.examine(device, seen)
        device.seen = seen.time
        if found is None:
            return ()
        device.found_time = found.time
        return (found,)

    def statuses(self) -> Iterable[DetectorStatus]:
        for uuid, device in self.state.devices.items():
            unknown = DetectorStatus("learning", self.unknown, device=uuid)
            yield self.explain(uuid, device) or unknown
