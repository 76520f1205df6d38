"""Energy of a job: what the devices of its ranks have used since the job was first seen."""

from __future__ import annotations

from collections.abc import Iterable

from warpwatch.telemetry.metric import SeriesKey
from warpwatch.telemetry.samples import DeviceSample
from warpwatch.telemetry.state import RankState

ENERGY: SeriesKey = ("device_energy_joules_total", ())


class JobEnergy:
    def __init__(self) -> None:
        self._jobs_of: dict[str, set[str]] = {}
        self._last: dict[str, float] = {}
        self._joules: dict[str, float] = {}

    def follow(self, ranks: Iterable[RankState]) -> None:
        """Which jobs run on which devices now; a job that is gone is forgotten."""
        jobs_of: dict[str, set[str]] = {}
        known = set()
        for rank in ranks:
            known.add(rank.job)
            if rank.device and rank.status in ("running", "stopped"):
                jobs_of.setdefault(rank.device, set()).add(rank.job)
        self._jobs_of = jobs_of
        self._joules = {job: joules for job, joules in self._joules.items() if job in known}

    def add(self, sample: DeviceSample) -> None:
        energy = sample.values.get(ENERGY)
        if energy is None:
            return
        before = self._last.get(sample.device.uuid, energy)
        self._last[sample.device.uuid] = energy
        jobs = self._jobs_of.get(sample.device.uuid, ())
        # A counter that went back was reset: its new value is all that was used since.
        used = energy if energy < before else energy - before
        for job in jobs:
            self._joules[job] = self._joules.get(job, 0.0) + used / len(jobs)

    def joules(self, job: str) -> float | None:
        return self._joules.get(job)
