"""Compares ranks on the CPU: their steps without waiting, and their order at collectives."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

from warpwatch_diagnosis.measures.cpu_time import CpuTime
from warpwatch_diagnosis.measures.intervals import Intervals, difference, union, within
from warpwatch_diagnosis.measures.measures import Measures

# Healthy peers differ by up to 14 % (PRISM, 2510.15596); cores shared with others by more.
MIN_LOCAL_RATIO = 1.25
# The others must wait longer than the culprit by this share of the window (our own value).
MIN_WAIT_EXCESS = 0.10
# A cause is there in nearly every step; noise changes sides.
MIN_CONSISTENCY = 0.80
# The limits for a rank that the detector of stragglers named, over many more steps (own values).
MIN_SUSPECT_RATIO = 1.10
MIN_SUSPECT_CONSISTENCY = 0.5
# Fewer calls of collectives do not show which rank is last (own values, as all below).
MIN_CALLS = 4
# One rank must be the last in this share of the calls.
MIN_LAST = 0.80
# In random order one of the ranks is last as often with at most this probability.
MAX_CHANCE = 1e-3
# If the others wait for less than this, the ranks come together.
MIN_LATENESS_US = 100.0
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
        steps = measures.steps
        waits = zip(steps, within(cpu.waiting, steps), strict=True)
        spent = zip(CPU_PARTS, _spent(measures, cpu), strict=True)
        return cls(
            measures=measures,
            local_us=[end - begin - us for (begin, end), us in waits],
            parts_us={part: median(within(us, steps)) for part, us in spent},
            wait_share=measures.share(cpu.waiting),
        )


def _spent(measures: Measures, cpu: CpuTime) -> tuple[Intervals, ...]:
    """Return disjoint parts in the order of CPU_PARTS."""
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
    """Return whether the steps of a rank are longer than those of the others."""
    steps = min(len(r.local_us) for r in (culprit, *others))
    ratio = MIN_SUSPECT_RATIO if is_suspect else MIN_LOCAL_RATIO
    consistency = MIN_SUSPECT_CONSISTENCY if is_suspect else MIN_CONSISTENCY
    longer = median(culprit.local_us) > ratio * median(median(r.local_us) for r in others)
    slower = sum(culprit.local_us[i] > max(r.local_us[i] for r in others) for i in range(steps))
    excess = min(r.wait_share for r in others) - culprit.wait_share
    return longer and slower >= consistency * steps and (is_suspect or excess > MIN_WAIT_EXCESS)


@dataclass(frozen=True, slots=True)
class LastRank:
    """The rank, an index into the capture, that is last in ``count`` of ``calls``.

    lateness_us: the others' typical waiting for it in all calls. chance: the probability that one
    of the ranks is last as often in random order.
    """

    rank: int
    count: int
    calls: int
    lateness_us: float
    chance: float


def last_rank(capture: Sequence[Measures]) -> LastRank | None:
    """Return the rank that nearly all calls wait for, or None.

    The last rank waits for nobody, so its calls are the shortest, and no clocks are compared.
    """
    calls = [[us - min(durations) for us in durations] for durations in _matched(capture)]
    late = [waits for waits in calls if median(sorted(waits)[1:]) >= MIN_LATENESS_US]
    if len(late) < MIN_CALLS:
        return None
    ((rank, count),) = Counter(waits.index(0.0) for waits in late).most_common(1)
    ranks = len(capture)
    chance = min(1.0, ranks * comb(len(late), count) / ranks**count)
    if count < MIN_LAST * len(late) or chance > MAX_CHANCE:
        return None
    lateness_us = sum(median(sorted(waits)[1:]) for waits in late if waits[rank] == 0.0)
    return LastRank(rank, count, len(late), lateness_us, chance)


def _matched(capture: Sequence[Measures]) -> list[list[float]]:
    """Return for each call that all ranks have the durations on the ranks."""
    found: dict[tuple[str, int], list[list[float]]] = defaultdict(list)
    for measures in capture:
        mine: dict[tuple[str, int], list[float]] = defaultdict(list)
        for name, step, took_us in measures.cpu.calls if measures.cpu else ():
            mine[name, step].append(took_us)
        for key, durations in mine.items():
            found[key].append(durations)
    return [
        list(call)
        for ranks in found.values()
        if len(ranks) == len(capture) and len(set(map(len, ranks))) == 1
        for call in zip(*ranks, strict=True)
    ]
