"""Splits a rank's window into disjoint parts: every instant belongs to exactly one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from warpwatch_diagnosis.comparison.before_after import cpu_phases
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.host_events import CAUSES
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

TimeParts = Mapping[str, Intervals]


class Breakdown:
    """The parts of each rank of a diagnosis, split once.

    chosen: the rank that the verdict names, else the rank with the longest window, else None.
    """

    def __init__(self, diagnosis: Diagnosis) -> None:
        self.diagnosis = diagnosis
        self.ranks = diagnosis.measures
        blamed = [f.label for f in diagnosis.findings[:1]]
        named = [m for m in self.ranks if m.label in blamed]
        self.chosen = next(iter(named), max(self.ranks, key=lambda m: m.window_us, default=None))
        self._parts: dict[int, TimeParts] = {}

    @property
    def several(self) -> bool:
        return len(self.ranks) > 1

    def parts(self, measures: Measures) -> TimeParts:
        """Return the parts that are not empty, in the order of PARTS."""
        if id(measures) not in self._parts:
            gpu, waits = measures.gpu, self.diagnosis.waits_for_ranks(measures)
            found = _gpu_parts(gpu, waits) if gpu else _cpu_parts(measures)
            self._parts[id(measures)] = {part: found[part] for part in PARTS if found.get(part)}
        return self._parts[id(measures)]


def _gpu_parts(gpu: GpuTime, waits: Intervals) -> dict[str, Intervals]:
    exposed = gpu.exposed_communication
    waiting = intersection(exposed, waits)
    busy = {
        "compute": gpu.compute,
        "communication": difference(exposed, waiting),
        "rank_wait": waiting,
        "copies": gpu.exposed_copies,
    }
    idle: dict[str, Intervals] = {cause: gpu.idle_time.of(cause) for cause in CAUSES}
    # A busy GPU has the part "communication"; here the host waits in a collective while it is idle.
    idle["blocked"] = idle.pop("communication")
    return busy | idle


def _cpu_parts(measures: Measures) -> dict[str, Intervals]:
    found = cpu_phases(measures)
    if measures.cpu is not None:
        saving = measures.cpu.saving
        found["rank_wait"] = found.pop("collective_wait")
        found["checkpoint"] = union(found["checkpoint"] + saving)
        found["host"] = difference(found["host"], saving)
    return found


def clipped(parts: TimeParts, window: Interval) -> TimeParts:
    found = {part: clip(intervals, window) for part, intervals in parts.items()}
    return {part: intervals for part, intervals in found.items() if intervals}


def sums_us(parts: TimeParts) -> dict[str, float]:
    return {part: total(intervals) for part, intervals in parts.items()}


def steps_us(parts: TimeParts, windows: Sequence[Interval]) -> list[dict[str, float]]:
    """Return the duration of each part per window."""
    return [sums_us(clipped(parts, window)) for window in windows]
