"""What a rank, a job or a device did lately, in points of ten seconds: fixed memory, O(1) a record.

A point is an array of sums, one column a quantity. About 180 bytes a point, 100 points.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

from warpwatch_telemetry.anomalies import ContextSeries
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import Step
from warpwatch_telemetry.series_text import series_text

INTERVAL_S = 10.0
# Ten minutes before an anomaly, five after, and some for what comes late.
MAX_POINTS = 100
# Bounded, also where a program names its phases differently in every step.
MAX_PHASES = 12

DEVICE_GAUGES: tuple[SeriesKey, ...] = (
    ("device_power_watts", ()),
    ("device_clock_hertz", ("sm",)),
    ("device_temperature_celsius", ("gpu",)),
    ("device_utilization_ratio", ()),
    ("device_memory_used_bytes", ()),
)
_GAUGE_NAMES = tuple(series_text(key) for key in DEVICE_GAUGES)

# Columns of a step rollup; phases follow. Of a job, LONGEST and MEMORY are those of one rank.
STEPS, DURATION, LONGEST, TOKENS, SAMPLES, MEMORY, RANKS = range(7)


class _Rollup:
    """``bucket``: of the point that is added to."""

    __slots__ = ("_point", "bucket", "points")

    def __init__(self) -> None:
        self.points: dict[int, array[float]] = {}
        self.bucket = -1
        self._point: array[float] = array("d")

    def _open(self, bucket: int, columns: int) -> array[float]:
        """The point of this time, now the one that is added to."""
        point = self.points.get(bucket)
        if point is None:
            point = self.points[bucket] = array("d", bytes(8 * columns))
            if len(self.points) > MAX_POINTS:
                del self.points[min(self.points)]
        self.bucket, self._point = bucket, point
        return point

    def _chosen(self, begin: float, end: float) -> dict[int, array[float]]:
        """The points that begin from ``begin`` to ``end`` (wall clock, seconds), in order."""
        chosen = sorted(at for at in self.points if begin <= at * INTERVAL_S <= end)
        return {bucket: self.points[bucket] for bucket in chosen}


class StepRollup(_Rollup):
    """Of one rank, or of all ranks of a job together."""

    __slots__ = ("_phases",)

    def __init__(self) -> None:
        super().__init__()
        self._phases: dict[str, int] = {}

    def add(self, step: Step, newcomer: bool | None = None) -> bool:
        """Whether a point begins with it.

        newcomer: of a job, whether it is the first step of its rank in this point.
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
        """The points that begin from ``begin`` to ``end`` (wall clock, seconds)."""
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
    """Means of the gauges of one device."""

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
    """A rate while the steps ran; the ranks of a job run at the same time and add up."""
    if not point[column] or point[DURATION] <= 0:
        return None
    return point[column] * point[RANKS] / point[DURATION]


def _series(
    chosen: Iterable[int],
    counts: list[int],
    values: Mapping[str, list[float | None]],
    about: Mapping[str, str | int | None],
) -> ContextSeries:
    """What is nowhere known is left out."""
    known = {
        name: tuple(column)
        for name, column in values.items()
        if any(value is not None for value in column)
    }
    times = tuple(bucket * INTERVAL_S for bucket in chosen)
    return ContextSeries(times, tuple(counts), known, **about)  # type: ignore[arg-type]
