"""Readings of simulated GPUs with faults on top, for the tests of the detectors of devices."""

import functools
import pickle
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


USUAL = (0.95, 1.0, ())


class Node:
    """GPUs in one clock, a rank of one job on each; ``broken`` is the one that faults are for."""

    def __init__(self, profile: str = "h100", gpus: int = 2, broken: int = 1) -> None:
        self.time = EPOCH_S
        self._profile = profile
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
        without: tuple[SeriesKey, ...] = (),
    ) -> Iterator[DeviceReading]:
        """``without``: series that no GPU has."""
        if self.time == EPOCH_S and fault is healthy and (load, interval_s, without) == USUAL:
            made, self.gpus, self.time = _healthy(self._profile, len(self.gpus), seconds)
            yield from made
            return
        begun = self.time
        while self.time < begun + seconds:
            self.time += interval_s
            for index, gpu in enumerate(self.gpus):
                values = dict(gpu.advance(self.time, interval_s, load).values)
                if index == self.broken:
                    values |= fault(self.time - begun, values)
                for name in without:
                    values.pop(name, None)
                yield DeviceReading(self.time, gpu.device.uuid, values, index=index)

    def down(self, seconds: float, reason: str, others: bool = True) -> Iterator[DeviceReading]:
        """The broken one cannot be read."""
        for reading in self.readings(seconds):
            if reading.device == self.uuid:
                yield DeviceReading(reading.time, self.uuid, {}, up=False, reason=reason)
            elif others:
                yield reading


@functools.cache
def _pickled(profile: str, gpus: int, seconds: float) -> tuple[list[DeviceReading], bytes]:
    """The first readings of healthy GPUs, made once for all nodes, and the GPUs after them."""
    node = Node(profile, gpus, broken=0)
    made = list(node.readings(seconds, lambda *_: {}))
    return made, pickle.dumps((node.gpus, node.time))


def _healthy(
    profile: str, gpus: int, seconds: float
) -> tuple[list[DeviceReading], list[SimulatedDevice], float]:
    made, after = _pickled(profile, gpus, seconds)
    return made, *pickle.loads(after)
