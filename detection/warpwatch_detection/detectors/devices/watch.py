"""Provides the base classes of device detectors: one state per device, and lasting symptoms."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from warpwatch_detection.detector import (
    NEVER,
    STALE_S,
    Cleared,
    Detector,
    DetectorResult,
    DetectorStatus,
    Results,
)
from warpwatch_telemetry.anomalies import Detected, Severity
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import DeviceReading

Metrics = Mapping[SeriesKey, float]


def series(name: str, *labels: str) -> SeriesKey:
    """Return the key of a device's metric from its name without the prefix ``device_``."""
    return f"device_{name}", labels


_UTILIZATION, _GRAPHICS = series("utilization_ratio"), series("graphics_active_ratio")


def utilization(metrics: Metrics) -> float | None:
    """Return the share of time in which something ran, 0 to 1; None if it is unknown.

    GPUs in MIG mode and MIG devices have no utilization, but may have the counters of GPM.
    """
    busy = metrics.get(_UTILIZATION)
    return metrics.get(_GRAPHICS) if busy is None else busy


# Below half of its utilization the driver lowers clocks by itself.
MIN_UTILIZATION = 0.5


def is_loaded(metrics: Metrics) -> bool | None:
    """Return whether the load is enough for the full clock; None if the load is unknown."""
    busy = utilization(metrics)
    return None if busy is None else busy >= MIN_UTILIZATION


# A symptom is not assumed to last over a pause between readings that is longer than this and longer
# than three times the pause before.
GAP_S = 60.0
# Below this part of its limit a symptom is over; between this part and the limit nothing changes.
RELEASE = 0.5
# A window is stored as this many parts.
WINDOW_PARTS = 10
# Readings more windows apart than this are not compared.
MOST_WINDOWS = 10


@dataclass(frozen=True, slots=True)
class Symptom:
    """One evaluation of a device.

    excess: the part of the limit, 1 at the limit. text: a sentence with the numbers. severity,
    hold_s: replace those of the kind. The rest is as in Detected.
    """

    excess: float
    text: str = ""
    value: float | None = None
    baseline: float | None = None
    limit: float | None = None
    severity: Severity | None = None
    hold_s: float | None = None


@dataclass(slots=True)
class Hysteresis:
    """A symptom over time; times are those of records.

    since: the first of the bad evaluations in a row or, once it is found, of the good ones.
    judged: the newest evaluation. pause_s: the pause before it. nearest: the largest excess so far;
    an excess at the limit counts by the part of ``hold_s`` that it lasted. text, value, baseline,
    limit: the newest symptom's.
    """

    found: bool = False
    since: float | None = None
    judged: float = -NEVER
    pause_s: float = 0.0
    nearest: float = 0.0
    text: str = ""
    value: float | None = None
    baseline: float | None = None
    limit: float | None = None

    def follow(self, now: float, symptom: Symptom, hold_s: float, clear_s: float) -> bool:
        """Apply a symptom. Return whether the fault is found now.

        It is found after ``hold_s`` at the limit, and over after ``clear_s`` below RELEASE of it.
        """
        pause_s, self.judged = now - self.judged, now
        if not 0 <= pause_s <= max(GAP_S, 3 * self.pause_s):
            self.since = None
        # A longer pause may be the interval of the readings from now on.
        if 0 < pause_s < NEVER:
            self.pause_s = pause_s
        self.text, self.value = symptom.text, symptom.value
        self.baseline, self.limit = symptom.baseline, symptom.limit
        near = symptom.excess
        is_turning = near < RELEASE if self.found else near >= 1
        if not is_turning:
            self.since = None
        elif self.since is None:
            self.since = now
        lasted_s = 0.0 if self.since is None else now - self.since
        if near >= 1:
            near = 1.0 if self.found or lasted_s >= hold_s else lasted_s / hold_s
        self.nearest = max(self.nearest, near)
        if is_turning and lasted_s >= (clear_s if self.found else hold_s):
            self.found, self.since = not self.found, None
        return self.found

    def interrupt(self) -> None:
        """Ignore the bad evaluations so far, unless the symptom is found."""
        if not self.found:
            self.since = None

    def end(self) -> None:
        self.found, self.since = False, None


@dataclass(slots=True)
class CounterGrowth:
    """The recent growth of a counter. The first count is ignored.

    A counter that fell started again at 0 (the driver was reloaded): all of its count is new.
    grown: the growth since the first count. points: times with this growth, the oldest first.
    """

    last: float | None = None
    grown: float = 0.0
    points: list[tuple[float, float]] = field(default_factory=list)

    def grow_to(self, total: float) -> float:
        """Return the growth since the last reading."""
        before, self.last = self.last, total
        grown = 0.0 if before is None else total - before if total >= before else total
        self.grown += grown
        return grown

    def add(self, now: float, total: float, window_s: float) -> float:
        """Return the growth in the last ``window_s``, by the mean rate if readings are rarer."""
        self.grow_to(total)
        points = self.points
        if not points or not 0 <= now - points[-1][0] <= MOST_WINDOWS * window_s:
            # Growth during a pause may be old.
            points[:] = [(now, self.grown)]
        elif now - points[-1][0] >= window_s / WINDOW_PARTS:
            points.append((now, self.grown))
        while len(points) > 1 and points[1][0] <= now - window_s:
            points.pop(0)
        time, grown = points[0]
        return (self.grown - grown) * window_s / max(window_s, now - time)


# MIG devices get a new UUID whenever they are made.
MAX_DEVICES = 256
# A lasting symptom is reported again at this interval, with its newest numbers.
REPEAT_S = 10.0
# How often devices are checked that may not be read any more.
CHECK_INTERVAL_S = 1.0


@dataclass(slots=True)
class Watched:
    """The base of a device's state. seen, found_time: the times of newest reading and result."""

    seen: float = -NEVER
    found_time: float = -NEVER
    hysteresis: Hysteresis = field(default_factory=Hysteresis)


S = TypeVar("S")
D = TypeVar("D", bound=Watched)


@dataclass(slots=True)
class DeviceStates(Generic[S]):
    """The state of a device detector: the states of its devices, by UUID."""

    devices: dict[str, S] = field(default_factory=dict)


class DeviceDetector(Detector, Generic[D]):
    """A detector that remembers each device in a ``state_of``."""

    reads: tuple[type, ...] = (DeviceReading,)
    # The status text of a device that was never evaluated.
    unknown: str = "the device has not reported what is needed"

    def __init__(self) -> None:
        self.state: Any = DeviceStates()

    def device(self, uuid: str) -> D:
        """Return the state of a device; if there are too many, evict the one silent for longest."""
        devices: dict[str, D] = self.state.devices
        if uuid not in devices:
            if len(devices) >= MAX_DEVICES:
                old = min(devices, key=lambda u: (devices[u].hysteresis.found, devices[u].seen))
                del devices[old]
            devices[uuid] = self.state_of()
        return devices[uuid]


class DeviceWatch(DeviceDetector[D]):
    """A detector of symptoms: found after they last ``hold_s``, over after ``clear_s`` without."""

    hold_s: float = 0.0
    clear_s: float = 0.0
    severity: Severity = "warning"

    def __init__(self) -> None:
        super().__init__()
        self._checked = -NEVER

    @abstractmethod
    def examine(self, device: D, seen: DeviceReading) -> Symptom | None:
        """Return the symptom of a reading; None if the reading lacks the needed values."""

    def observe(self, seen: Any) -> Results:
        device = self.device(seen.device)
        symptom = self.examine(device, seen)
        device.seen = seen.time
        results = self.follow(seen.device, device, symptom, seen.time) if symptom else []
        if abs(seen.time - self._checked) >= CHECK_INTERVAL_S:
            results.extend(self.check_all(seen.time))
            self._checked = seen.time
        return results

    def follow(self, uuid: str, device: D, symptom: Symptom, now: float) -> list[DetectorResult]:
        hysteresis, before = device.hysteresis, device.hysteresis.found
        hold_s = self.hold_s if symptom.hold_s is None else symptom.hold_s
        if not hysteresis.follow(now, symptom, hold_s, self.clear_s):
            return [Cleared(now, device=uuid)] if before else []
        if before and 0 <= now - device.found_time < REPEAT_S:
            return []
        device.found_time = now
        found = Detected(
            now,
            symptom.severity or self.severity,
            symptom.text,
            device=uuid,
            value=symptom.value,
            baseline=symptom.baseline,
        )
        return [found]

    def check_all(self, now: float) -> Iterable[DetectorResult]:
        """Yield the results for devices that were not read or evaluated: stale symptoms end."""
        # The daemon was away, not the devices.
        was_away = now - self._checked >= STALE_S
        for uuid, device in self.state.devices.items():
            hysteresis = device.hysteresis
            if hysteresis.found and was_away:
                hysteresis.judged = now
            elif hysteresis.found and now - hysteresis.judged >= STALE_S:
                hysteresis.end()
                yield Cleared(now, device=uuid)

    def statuses(self) -> Iterable[DetectorStatus]:
        for uuid, device in self.state.devices.items():
            hysteresis = device.hysteresis
            if not hysteresis.text:
                yield DetectorStatus("learning", self.unknown, device=uuid)
                continue
            yield DetectorStatus(
                "found" if hysteresis.found else "fine",
                hysteresis.text,
                device=uuid,
                value=hysteresis.value,
                baseline=hysteresis.baseline,
                limit=hysteresis.limit,
                nearest=hysteresis.nearest,
            )


@dataclass(slots=True)
class EventDevice(Watched):
    """A device with its newest event. known: whether it reports the needed values."""

    summary: str = ""
    value: float | None = None
    known: bool = False


E = TypeVar("E", bound=EventDevice)


class DeviceEvents(DeviceDetector[E]):
    """A detector of events; the register holds an anomaly for ``hold_s`` after the last one."""

    # The status text of a device without a recent event.
    fine: str

    def __init__(self, hold_s: float) -> None:
        super().__init__()
        self._hold_s = hold_s

    def lasts(self, device: E, now: float) -> bool:
        """Return whether the last event was less than ``hold_s`` ago."""
        return 0 <= now - device.found_time <= self._hold_s

    @abstractmethod
    def examine(self, device: E, seen: DeviceReading) -> Detected | None:
        """Return an event since the last reading, or None."""

    def observe(self, seen: Any) -> Results:
        device = self.device(seen.device)
        found = self.examine(device, seen)
        device.seen = seen.time
        if found is None:
            return ()
        device.found_time, device.summary, device.value = found.time, found.summary, found.value
        return (found,)

    def statuses(self) -> Iterable[DetectorStatus]:
        for uuid, device in self.state.devices.items():
            if not device.known:
                yield DetectorStatus("learning", self.unknown, device=uuid)
            elif self.lasts(device, device.seen):
                yield DetectorStatus("found", device.summary, device=uuid, value=device.value)
            else:
                yield DetectorStatus("fine", self.fine, device=uuid)
