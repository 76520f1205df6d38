"""Readings of simulated GPUs with faults on top, for the tests of the detectors of devices."""

from collections.abc import Callable, Iterator, Mapping

from tests.detection.streams import EPOCH_S
from warpwatch_devices.simulated import PROFILES, SimulatedDevice
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import DeviceReading, RankSeen, Record

Metrics = Mapping[SeriesKey, float]
# Seconds since the fault began, and the healthy values -> what is different.
Fault = Callable[[float, Metrics], Metrics]
JOB = "llama"


def key(name: str, *labels: str) -> SeriesKey:
    return f"device_{name}", labels


def healthy(since_s: float, values: Metrics) -> Metrics:
    return {}


class Node:
    """GPUs in one clock, a rank of one job on each; ``broken`` is the one that faults are for."""

    def __init__(self, profile: str = "h100", gpus: int = 2, broken: int = 1) -> None:
        self.time = EPOCH_S
        self.gpus = [SimulatedDevice(index, PROFILES[profile]) for index in range(gpus)]
        self.uuids = [gpu.device.uuid for gpu in self.gpus]
        self.broken = broken
        self.uuid = self.uuids[broken]

    def seen(self) -> Iterator[Record]:
        for rank, uuid in enumerate(self.uuids):
            yield RankSeen(self.time, JOB, rank, len(self.gpus), uuid)

    def readings(
        self,
        seconds: float,
        fault: Fault = healthy,
        load: float | None = 0.95,
        interval_s: float = 1.0,
    ) -> Iterator[DeviceReading]:
        begun = self.time
        while self.time < begun + seconds:
            self.time += interval_s
            for index, gpu in enumerate(self.gpus):
                values = dict(gpu.advance(self.time, interval_s, load).values)
                if index == self.broken:
                    values |= fault(self.time - begun, values)
                yield DeviceReading(self.time, gpu.device.uuid, values, index=index)

    def down(self, seconds: float, reason: str) -> Iterator[DeviceReading]:
        """The broken one cannot be read."""
        for reading in self.readings(seconds):
            if reading.device == self.uuid:
                yield DeviceReading(reading.time, self.uuid, {}, up=False, reason=reason)
            else:
                yield reading
