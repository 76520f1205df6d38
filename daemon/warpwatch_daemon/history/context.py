"""The metrics of the minutes around an anomaly, from what every rank and device did lately."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from warpwatch_daemon.history.rollups import INTERVAL_S, DeviceRollup, StepRollup
from warpwatch_telemetry.anomalies import Anomaly, AnomalyContext, ContextSeries
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import DeviceReading, Record, Step

BEFORE_S = 600.0
AFTER_S = 300.0
# As many as series are exported of; a device is a GPU or a MIG instance.
MAX_RANKS = 1024
MAX_DEVICES = 512
MAX_JOBS = 256

Name = TypeVar("Name", str, JobId, tuple[JobId, int])
Kind = TypeVar("Kind", StepRollup, DeviceRollup)


class Context:
    """Records in; ``around`` an anomaly, the series of its job, its rank and its device."""

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
    """Of this name; where a new one is one too many, that which was silent for longest goes."""
    rollup = rollups.get(name)
    if rollup is None:
        if len(rollups) >= most:
            del rollups[min(rollups, key=lambda name: rollups[name].bucket)]
        rollup = rollups[name] = new()
    return rollup


def joined(older: AnomalyContext, newer: AnomalyContext) -> AnomalyContext:
    """Both together; of a point that both have, the one that has seen more."""
    by_name = {_name(series): series for series in older.series}
    for series in newer.series:
        before = by_name.get(_name(series))
        by_name[_name(series)] = series if before is None else _joined(before, series)
    return AnomalyContext(newer.interval_s, tuple(by_name.values()))


def _name(series: ContextSeries) -> tuple[str | None, int | None, str | None]:
    return (series.job, series.rank, series.device)


def _joined(older: ContextSeries, newer: ContextSeries) -> ContextSeries:
    rows = _rows(older)
    for time, row in _rows(newer).items():
        if time not in rows or row[0] >= rows[time][0]:
            rows[time] = row
    times = tuple(sorted(rows))
    names = dict.fromkeys((*older.values, *newer.values))
    return replace(
        newer,
        times=times,
        counts=tuple(rows[time][0] for time in times),
        values={name: tuple(rows[time][1].get(name) for time in times) for name in names},
    )


def _rows(series: ContextSeries) -> dict[float, tuple[int, Mapping[str, float | None]]]:
    return {
        time: (count, {name: column[index] for name, column in series.values.items()})
        for index, (time, count) in enumerate(zip(series.times, series.counts, strict=True))
    }
