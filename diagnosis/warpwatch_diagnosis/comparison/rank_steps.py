"""The steps of ranks on the CPU beside each other: whose are longer without waiting, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from warpwatch_diagnosis.measures.cpu_time import CpuTime
from warpwatch_diagnosis.measures.intervals import Intervals, difference, union, within
from warpwatch_diagnosis.measures.measures import Measures

# Healthy peers differ by up to 14 % (PRISM, 2510.15596); cores shared with others by more.
MIN_LOCAL_RATIO = 1.25
# By how much of the window the others must wait longer than the culprit (our own value).
MIN_WAIT_EXCESS = 0.10
# A cause is there in (nearly) every step; noise changes sides.
MIN_CONSISTENCY = 0.80
# Of a rank that the detector of stragglers named, which has seen many more steps (own values).
MIN_SUSPECT_RATIO = 1.10
MIN_SUSPECT_CONSISTENCY = 0.5
# The parts of a step on the CPU as the evidence names them, and the rules that say more.
OPERATORS = "operators"
CPU_PARTS: dict[str, tuple[str, ...]] = {
    "data loading": ("data_loading",),
    "compiling": ("recompilation",),
    "garbage collection": ("gc_pause",),
    "writing a checkpoint": ("checkpoint",),
    "reading values": ("sync_bound",),
    OPERATORS: (),
    "Python between the operators": (),
}


@dataclass(frozen=True, slots=True)
class RankSteps:
    """A rank on the CPU, in µs: each step without waiting, and the parts of the typical step."""

    measures: Measures
    local_us: list[float]
    parts_us: dict[str, float]
    wait_share: float

    @classmethod
    def of(cls, measures: Measures, cpu: CpuTime) -> RankSteps:
        waits = within(cpu.waiting, measures.steps)
        spent = zip(CPU_PARTS, _spent(measures, cpu), strict=True)
        return cls(
            measures=measures,
            local_us=[
                end - begin - us for (begin, end), us in zip(measures.steps, waits, strict=True)
            ],
            parts_us={part: median(within(us, measures.steps)) for part, us in spent},
            wait_share=measures.share(cpu.waiting),
        )


def _spent(measures: Measures, cpu: CpuTime) -> tuple[Intervals, ...]:
    """Disjoint, in the order of CPU_PARTS."""
    patterns = union(cpu.reading + cpu.saving)
    return (
        measures.loading,
        cpu.compile,
        cpu.gc,
        union(cpu.checkpoint + cpu.saving),
        difference(cpu.reading, cpu.saving),
        difference(cpu.operators, patterns),
        difference(cpu.host, patterns),
    )


def lags(culprit: RankSteps, others: Sequence[RankSteps], is_suspect: bool) -> bool:
    steps = min(len(r.local_us) for r in (culprit, *others))
    typical = median(median(r.local_us) for r in others)
    slower = sum(culprit.local_us[i] > max(r.local_us[i] for r in others) for i in range(steps))
    if is_suspect:
        longer = median(culprit.local_us) > MIN_SUSPECT_RATIO * typical
        return longer and slower >= MIN_SUSPECT_CONSISTENCY * steps
    return (
        median(culprit.local_us) > MIN_LOCAL_RATIO * typical
        and slower >= MIN_CONSISTENCY * steps
        and min(r.wait_share for r in others) - culprit.wait_share > MIN_WAIT_EXCESS
    )
