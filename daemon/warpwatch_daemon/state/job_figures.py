"""Calculates figures of jobs: their energy, and their model FLOPs utilization (MFU)."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from warpwatch_diagnosis.measures.roofline import peaks_of
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import DeviceSample
from warpwatch_telemetry.state import RankState


def ideal_steps(captures: Iterable[Capture]) -> dict[JobId, float]:
    """Return seconds of a step, by job, if its GPUs computed at their peak all the time."""
    found = {}
    for capture in captures:
        traces = (capture.diagnosis or {}).get("traces") or ()
        steps_s = [s for trace in traces if (s := _ideal_step(trace)) is not None]
        if steps_s:
            found[capture.request.job_id] = statistics.fmean(steps_s)
    return found


def _ideal_step(trace: Mapping[str, Any]) -> float | None:
    ratio = (trace.get("roofline") or {}).get("mfu_ratio")
    steps, window_s = trace.get("steps"), trace.get("window_s")
    return ratio * window_s / steps if ratio and window_s and steps else None


def ratios(
    ranks: Sequence[RankState], ideal_step_s: float | None, models: Mapping[str, str]
) -> dict[str, float]:
    """Return MFU by method of a job's running ranks. ``models``: names of GPUs by UUID."""
    running = [rank for rank in ranks if rank.steps_per_s]
    found = {"user": _mean(running, models, _said)}
    if running and ideal_step_s is not None:
        found["shapes"] = ideal_step_s * statistics.median(r.steps_per_s or 0.0 for r in running)
    if not any(found.values()):
        found = {"parameters": _mean(running, models, _by_parameters)}
    return {method: ratio for method, ratio in found.items() if ratio}


def _mean(
    ranks: Sequence[RankState],
    models: Mapping[str, str],
    flops_per_s: Callable[[RankState], float],
) -> float:
    """Return the mean over ranks, 0 unless all are known."""
    known = []
    for rank in ranks:
        peaks = peaks_of(models.get(rank.device or ""))
        peak = peaks.flops_per_s.get(rank.precision) if peaks else None
        known.append(flops_per_s(rank) / peak if peak else 0.0)
    return statistics.fmean(known) if known and all(known) else 0.0


def _said(rank: RankState) -> float:
    flops_per_s = rank.flops_per_token * (rank.tokens_per_s or 0.0)
    flops_per_s = flops_per_s or rank.flops_per_sample * (rank.samples_per_s or 0.0)
    # These ranks read the same batch, and each computes its part of it.
    sharing = (rank.parallel.get(kind, (0, 1))[1] for kind in ("tensor", "pipeline", "context"))
    return flops_per_s / math.prod(sharing)


def _by_parameters(rank: RankState) -> float:
    splits = any(size > 1 for kind, (_, size) in rank.parallel.items() if kind != "data")
    return 0.0 if splits else 6.0 * rank.parameters * (rank.tokens_per_s or 0.0)


ENERGY: SeriesKey = ("device_energy_joules_total", ())
MIG_MODE: SeriesKey = ("device_mig_mode", ())

# A rank by its job and number.
RankId = tuple[JobId, int]


class JobEnergy:
    """The energy of ranks and jobs: of a device's use, each owner and rank has an equal share."""

    def __init__(self) -> None:
        self._ranks_on: dict[str, list[RankId]] = {}
        # By device: the source of its counter, and the counter's newest value.
        self._last: dict[str, tuple[str, float]] = {}
        self._rank_joules: dict[RankId, float] = {}
        self._job_joules: dict[JobId, float] = {}
        # By job: its first tokens and joules, once both were known.
        self._first: dict[JobId, tuple[int, float]] = {}

    def follow(self, devices: Mapping[RankId, str | None]) -> None:
        """Set the device of each rank, None for an ended one; others are forgotten."""
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
        """Return the rank with its energy if known."""
        joules = self._rank_joules.get((rank.job_id, rank.rank))
        return rank if joules is None else replace(rank, energy_j=joules)

    def joules(self, job: JobId) -> float | None:
        return self._job_joules.get(job)

    def tokens_per_joule(self, job: JobId, tokens: int) -> float | None:
        """Return tokens per joule since both are known, or None. ``tokens``: all ranks' total."""
        joules = self._job_joules.get(job)
        if not joules or not tokens:
            return None
        begun = self._first.setdefault(job, (tokens, joules))
        if tokens < begun[0]:
            begun = self._first[job] = tokens, joules
        spent = joules - begun[1]
        return (tokens - begun[0]) / spent if spent and tokens > begun[0] else None
