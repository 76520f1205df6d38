"""Energy of ranks and jobs: what their devices have used while they ran and this daemon looked.

The owners of the ranks on one device share its energy evenly, and so do the ranks of each, so that
their sum is never more than the device's own counter: no counter knows which of them used more, and
which device a rank is on is its own word. Not attributed are the energy of a GPU in MIG
mode, whose counter covers all of its instances, and that of an interval in which the counter was
reset or its source changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import DeviceSample
from warpwatch_telemetry.state import RankState

ENERGY: SeriesKey = ("device_energy_joules_total", ())
MIG_MODE: SeriesKey = ("device_mig_mode", ())

# A rank by its job and number.
RankId = tuple[JobId, int]


class JobEnergy:
    def __init__(self) -> None:
        self._ranks_on: dict[str, list[RankId]] = {}
        # By device: the source of its counter, and the counter's newest value.
        self._last: dict[str, tuple[str, float]] = {}
        self._rank_joules: dict[RankId, float] = {}
        self._job_joules: dict[JobId, float] = {}
        # By job: its tokens and joules when both were known for the first time.
        self._first: dict[JobId, tuple[int, float]] = {}

    def follow(self, devices: Mapping[RankId, str | None]) -> None:
        """The device that each rank runs on, None for one that has ended; others are forgotten."""
        self._ranks_on = {}
        for key, device in devices.items():
            if device:
                self._ranks_on.setdefault(device, []).append(key)
        jobs = {job for job, _ in devices}
        self._rank_joules = {key: j for key, j in self._rank_joules.items() if key in devices}
        self._job_joules = {job: j for job, j in self._job_joules.items() if job in jobs}
        self._first = {job: first for job, first in self._first.items() if job in jobs}

    def add(self, sample: DeviceSample) -> None:
        energy = sample.values.get(ENERGY)
        if energy is None:
            return
        source, before = self._last.get(sample.device.uuid, (sample.source, energy))
        self._last[sample.device.uuid] = sample.source, energy
        ranks = self._ranks_on.get(sample.device.uuid)
        if not ranks or sample.values.get(MIG_MODE):
            return
        used = max(0.0, energy - before) if source == sample.source else 0.0
        owners = Counter(job.owner for job, _ in ranks)
        for key in ranks:
            share = used / len(owners) / owners[key[0].owner]
            self._rank_joules[key] = self._rank_joules.get(key, 0.0) + share
            self._job_joules[key[0]] = self._job_joules.get(key[0], 0.0) + share

    def joined(self, rank: RankState) -> RankState:
        """The rank with its energy, where that is known."""
        joules = self._rank_joules.get((rank.job_id, rank.rank))
        return rank if joules is None else replace(rank, energy_j=joules)

    def joules(self, job: JobId) -> float | None:
        return self._job_joules.get(job)

    def tokens_per_joule(self, job: JobId, tokens: int) -> float | None:
        """``tokens``: of all ranks until now. Since both were known; None where they are not."""
        joules = self._job_joules.get(job)
        if not joules or not tokens:
            return None
        begun = self._first.setdefault(job, (tokens, joules))
        if tokens < begun[0]:
            begun = self._first[job] = tokens, joules
        spent = joules - begun[1]
        return (tokens - begun[0]) / spent if spent and tokens > begun[0] else None
