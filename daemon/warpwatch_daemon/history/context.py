"""Keeps the recent metrics of ranks, jobs and devices, for the context of an anomaly.

They are kept in points of ten seconds, in fixed memory and O(1) per record. A point is an array of
sums, one column per quantity: about 180 bytes per point, 100 points.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from typing import TypeVar

from warpwatch_telemetry.anomalies import Anomaly, AnomalyContext, ContextSeries
from warpwatch_telemetry.catalogue import series_text
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import DeviceReading, Record, Step

BEFORE_S = 600.0
AFTER_S = 300.0
# As many as have exported series; a device is a GPU or a MIG instance.
MAX_RANKS = 1024
MAX_DEVICES = 512
MAX_JOBS = 256
INTERVAL_S = 10.0
# Ten minutes before an anomaly, five after, and some for late records.
MAX_POINTS = 100
# The bound holds even if a program names its phases differently in every step.
MAX_PHASES = 12

DEVICE_GAUGES: tuple[SeriesKey, ...] = (
    ("device_power_watts", ()),
    ("device_clock_hertz", ("sm",)),
    ("device_temperature_celsius", ("gpu",)),
    ("device_utilization_ratio", ()),
    ("device_memory_used_bytes", ()),
)
_GAUGE_NAMES = tuple(series_text(key) for key in DEVICE_GAUGES)

# Columns of a step rollup; phases follow. LONGEST and MEMORY of a job are of one rank.
STEPS, DURATION, LONGEST, TOKENS, SAMPLES, MEMORY, RANKS = range(7)


class _Rollup:
    """Points by time. ``bucket``: the time of the current point."""

    __slots__ = ("_point", "bucket", "points")

    def __init__(self) -> None:
        self.points: dict[int, array[float]] = {}
        self.bucket = -1
        self._point: array[float] = array("d")

    def _open(self, bucket: int, columns: int) -> array[float]:
        """Make the point of this time the current one, and return it."""
        point = self.points.get(bucket)
        if point is None:
            point = self.points[bucket] = array("d", bytes(8 * columns))
            if len(self.points) > MAX_POINTS:
                # Not the earliest time: a clock that was set back would lose each new point.
                del self.points[next(iter(self.points))]
        self.bucket, self._point = bucket, point
        return point

    def _chosen(self, begin: float, end: float) -> dict[int, array[float]]:
        """Return the points that begin from ``begin`` to ``end`` (wall clock), in order."""
        chosen = sorted(at for at in self.points if begin <= at * INTERVAL_S <= end)
        return {bucket: self.points[bucket] for bucket in chosen}


class StepRollup(_Rollup):
    """The steps of one rank, or of all ranks of a job."""

    __slots__ = ("_phases",)

    def __init__(self) -> None:
        super().__init__()
        self._phases: dict[str, int] = {}

    def add(self, step: Step, newcomer: bool | None = None) -> bool:
        """Add a step, and return whether it begins a point.

        newcomer: for a job, whether it is the first step of its rank in this point.
        """
        bucket = int(step.time // INTERVAL_S)
        opens = bucket != self.bucket
        point = self._open(bucket, RANKS + 1 + len(self._phases)) if opens else self._point
        duration_s = step.duration_s
        point[STEPS] += 1
        point[DURATION] += duration_s
        if duration_s > point[LONGEST]:
            point[LONGEST] = duration_s
        point[TOKENS] += step.tokens
        point[SAMPLES] += step.samples
        if opens if newcomer is None else newcomer:
            point[RANKS] += 1
        if step.memory_allocated_bytes is not None:
            point[MEMORY] = max(point[MEMORY], step.memory_allocated_bytes)
        for name, phase_s in step.phases_s.items():
            self._add_phase(point, name, phase_s)
        return opens

    def _add_phase(self, point: array[float], name: str, phase_s: float) -> None:
        column = self._phases.get(name)
        if column is None:
            if len(self._phases) >= MAX_PHASES:
                return
            column = self._phases[name] = RANKS + 1 + len(self._phases)
        if column >= len(point):
            point.extend([0.0] * (column + 1 - len(point)))
        point[column] += phase_s

    def series(self, begin: float, end: float, **about: str | int | None) -> ContextSeries:
        """Return the points that begin from ``begin`` to ``end`` (wall clock, seconds)."""
        chosen = self._chosen(begin, end)
        points = chosen.values()
        values: dict[str, list[float | None]] = {
            "step_duration_s": [point[DURATION] / point[STEPS] for point in points],
            "step_duration_max_s": [point[LONGEST] for point in points],
            "tokens_per_s": [_per_s(point, TOKENS) for point in points],
            "samples_per_s": [_per_s(point, SAMPLES) for point in points],
            "memory_allocated_bytes": [point[MEMORY] or None for point in points],
        }
        for name, column in self._phases.items():
            values[f"phase_s{{phase={name}}}"] = [
                point[column] / point[STEPS] if column < len(point) else None for point in points
            ]
        return _series(chosen, [int(point[STEPS]) for point in points], values, about)


class DeviceRollup(_Rollup):
    """The means of the gauges of one device."""

    __slots__ = ()

    def add(self, time: float, metrics: Mapping[SeriesKey, float]) -> None:
        bucket = int(time // INTERVAL_S)
        if bucket != self.bucket:
            self._open(bucket, 1 + 2 * len(DEVICE_GAUGES))
        point = self._point
        point[0] += 1
        for index, key in enumerate(DEVICE_GAUGES):
            value = metrics.get(key)
            if value is not None:
                point[2 * index + 1] += 1
                point[2 * index + 2] += value

    def series(self, begin: float, end: float, **about: str | int | None) -> ContextSeries:
        chosen = self._chosen(begin, end)
        points = chosen.values()
        values: dict[str, list[float | None]] = {
            name: [
                point[2 * index + 2] / point[2 * index + 1] if point[2 * index + 1] else None
                for point in points
            ]
            for index, name in enumerate(_GAUGE_NAMES)
        }
        return _series(chosen, [int(point[0]) for point in points], values, about)


def _per_s(point: array[float], column: int) -> float | None:
    """Return the rate while the steps ran; the ranks of a job add up."""
    if not point[column] or point[DURATION] <= 0:
        return None
    return point[column] * point[RANKS] / point[DURATION]


def _series(
    chosen: Iterable[int],
    counts: list[int],
    values: Mapping[str, list[float | None]],
    about: Mapping[str, str | int | None],
) -> ContextSeries:
    """Return the series, without those that have no value."""
    known = {
        name: tuple(column)
        for name, column in values.items()
        if any(value is not None for value in column)
    }
    times = tuple(bucket * INTERVAL_S for bucket in chosen)
    return ContextSeries(times, tuple(counts), known, **about)  # type: ignore[arg-type]


Name = TypeVar("Name", str, JobId, tuple[JobId, int])
Kind = TypeVar("Kind", StepRollup, DeviceRollup)


class Context:
    """The recent metrics, from records; ``around`` returns those of an anomaly."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[JobId, int], StepRollup] = {}
        self._jobs: dict[JobId, StepRollup] = {}
        self._devices: dict[str, DeviceRollup] = {}

    def observe(self, record: Record) -> None:
        if type(record) is Step:
            rank = (record.job_id, record.rank)
            newcomer = _of(self._ranks, rank, StepRollup, MAX_RANKS).add(record)
            _of(self._jobs, record.job_id, StepRollup, MAX_JOBS).add(record, newcomer)
        elif isinstance(record, DeviceReading):
            rollup = _of(self._devices, record.device, DeviceRollup, MAX_DEVICES)
            rollup.add(record.time, record.metrics)

    def around(self, anomaly: Anomaly) -> AnomalyContext:
        begin = anomaly.time - BEFORE_S - INTERVAL_S
        end = anomaly.time + AFTER_S
        series = []
        job, rank, device = anomaly.job_id, anomaly.rank, anomaly.device
        if job is not None and job in self._jobs:
            series.append(self._jobs[job].series(begin, end, job=job.name))
        if job is not None and rank is not None and (job, rank) in self._ranks:
            series.append(self._ranks[job, rank].series(begin, end, job=job.name, rank=rank))
        if device in self._devices:
            series.append(self._devices[device].series(begin, end, device=device))
        return AnomalyContext(INTERVAL_S, tuple(one for one in series if one.times))


def _of(rollups: dict[Name, Kind], name: Name, new: type[Kind], most: int) -> Kind:
    """Return the rollup of this name; a new one may evict the one that is silent for longest."""
    rollup = rollups.get(name)
    if rollup is None:
        if len(rollups) >= most:
            del rollups[min(rollups, key=lambda name: rollups[name].bucket)]
        rollup = rollups[name] = new()
    return rollup
