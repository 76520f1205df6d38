"""A rank's window as disjoint parts: every instant belongs to exactly one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warpwatch_diagnosis.comparison.alignment import Alignment
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.idle import CAUSES
from warpwatch_diagnosis.measures.intervals import (
    Interval,
    Intervals,
    clip,
    difference,
    intersection,
    total,
    union,
)
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.report.words import PARTS
from warpwatch_diagnosis.verdict.conclusion import Diagnosis

Parts = Mapping[str, Intervals]


class Capture:
    """A diagnosis whose windows are taken apart, each once.

    chosen: the rank that the verdict names, else the one with the longest window; None if there
    is no trace.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis
        self.ranks = diagnosis.measures
        self.chosen = _worst_rank(diagnosis)
        self._parts: dict[int, Parts] = {}

    @property
    def several(self) -> bool:
        return len(self.ranks) > 1

    def parts(self, measures: Measures) -> Parts:
        """By the keys of PARTS, in that order, without empty ones."""
        if id(measures) not in self._parts:
            self._parts[id(measures)] = _rank_parts(self.diagnosis, measures)
        return self._parts[id(measures)]


def _worst_rank(diagnosis: Diagnosis) -> Measures | None:
    for finding in diagnosis.findings[:1]:
        named = [m for m in diagnosis.measures if m.label == finding.label]
        if named:
            return named[0]
    return max(diagnosis.measures, key=lambda m: m.window_us, default=None)


def _rank_parts(diagnosis: Diagnosis, measures: Measures) -> Parts:
    if measures.gpu is not None:
        found = _gpu_parts(measures.gpu, _waits_for_ranks(diagnosis, measures))
    else:
        found = _cpu_parts(measures)
    return {part: found[part] for part in PARTS if found.get(part)}


def _waits_for_ranks(diagnosis: Diagnosis, measures: Measures) -> Intervals:
    """Where this rank is in a collective that others have not reached; empty if not known."""
    alignment = diagnosis.alignment
    index = aligned_index(diagnosis, measures)
    return _waits(alignment, index, measures.window) if alignment and index is not None else []


def aligned_index(diagnosis: Diagnosis, measures: Measures) -> int | None:
    """The rank's place in the alignment, which has those with enough in their traces."""
    enough = [id(m) for m in diagnosis.measures if m.shortage is None]
    return enough.index(id(measures)) if id(measures) in enough else None


def _waits(alignment: Alignment, index: int, window: Interval) -> Intervals:
    waits = []
    for meeting in alignment.meetings:
        if index in meeting.ranks:
            nth = meeting.ranks.index(index)
            begin_us = meeting.begins_us[nth]
            waits.append((begin_us, begin_us + meeting.waits_us[nth]))
    return union(clip(waits, window))


def _gpu_parts(gpu: GpuTime, waits: Intervals) -> dict[str, Intervals]:
    exposed = gpu.exposed_communication
    waiting = intersection(exposed, waits)
    busy = {
        "compute": gpu.compute,
        "communication": difference(exposed, waiting),
        "rank_wait": waiting,
        "copies": difference(difference(gpu.busy, gpu.compute), exposed),
    }
    idle: dict[str, Intervals] = {cause: gpu.idle_time.by_cause[cause] for cause in CAUSES}
    idle["blocked"] = idle.pop("communication")
    return busy | idle


def _cpu_parts(measures: Measures) -> dict[str, Intervals]:
    cpu = measures.cpu
    if cpu is None:
        return {}
    return {
        "data_loading": measures.loading,
        "compile": cpu.compile,
        "gc": cpu.gc,
        "checkpoint": union(cpu.checkpoint + cpu.saving),
        "operators": cpu.operators,
        "rank_wait": cpu.waiting,
        "host": difference(cpu.host, cpu.saving),
    }


def clipped(parts: Parts, window: Interval) -> Parts:
    found = {part: clip(intervals, window) for part, intervals in parts.items()}
    return {part: intervals for part, intervals in found.items() if intervals}


def sums_us(parts: Parts) -> dict[str, float]:
    return {part: total(intervals) for part, intervals in parts.items()}


def steps_us(parts: Parts, windows: Sequence[Interval]) -> list[dict[str, float]]:
    """Of each window what its parts take."""
    return [sums_us(clipped(parts, window)) for window in windows]
