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


class Context:
    """Records in; ``around`` an anomaly, the series of its job, its rank and its device."""

    def __init__(self) -> None:
        self._ranks: dict[tuple[JobId, int], StepRollup] = {}
        self._jobs: dict[JobId, StepRollup] = {}
        self._devices: dict[str, DeviceRollup] = {}

    def observe(self, record: Record) -> None:
        if type(record) is Step:
            self._step(record)
        elif isinstance(record, DeviceReading):
            rollup = self._devices.get(record.device)
            if rollup is None:
                _make_room(self._devices, MAX_DEVICES)
                rollup = self._devices[record.device] = DeviceRollup()
            rollup.add(record.time, record.metrics)

    def _step(self, record: Step) -> None:
        name = (record.job_id, record.rank)
        rollup = self._ranks.get(name)
        if rollup is None:
            _make_room(self._ranks, MAX_RANKS)
            rollup = self._ranks[name] = StepRollup()
        newcomer = rollup.add(record)
        self._job(record.job_id).add(record, newcomer)

    def _job(self, name: JobId) -> StepRollup:
        rollup = self._jobs.get(name)
        if rollup is None:
            _make_room(self._jobs, MAX_JOBS)
            rollup = self._jobs[name] = StepRollup()
        return rollup

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


def _make_room(rollups: dict[Name, StepRollup] | dict[Name, DeviceRollup], most: int) -> None:
    """The one that was silent for longest goes."""
    if len(rollups) >= most:
        del rollups[min(rollups, key=lambda name: rollups[name].bucket)]


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
