"""The steps of ranks on the CPU beside each other: whose are longer without waiting, and why."""

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


# Collectives with fewer calls say nothing of who is last (own values, as all here).
MIN_CALLS = 4
# Of the calls one rank must be the last in so many.
MIN_LAST = 0.80
# In random order one of the ranks is last that often at most.
MAX_CHANCE = 1e-3
# A call in which the others wait for less than this has no last one: they come together.
MIN_LATENESS_US = 100.0


@dataclass(frozen=True, slots=True)
class LastRank:
    """The rank, an index into the capture, that is last in ``count`` of ``calls``.

    lateness_us: what the typical other one waited for it, in all calls. chance: that one of the
    ranks is last as often where the order is random.
    """

    rank: int
    count: int
    calls: int
    lateness_us: float
    chance: float


def last_rank(capture: Sequence[Measures]) -> LastRank | None:
    """The one that nearly all calls wait for; None where there is none, or too few calls."""
    calls = [_waits(spans) for spans in _matched(capture)]
    late = [waits for waits in calls if median(sorted(waits)[1:]) >= MIN_LATENESS_US]
    if len(late) < MIN_CALLS:
        return None
    lasts = Counter(waits.index(0.0) for waits in late)
    ((rank, count),) = lasts.most_common(1)
    ranks = len(capture)
    chance = min(1.0, ranks * comb(len(late), count) / ranks**count)
    if count < MIN_LAST * len(late) or chance > MAX_CHANCE:
        return None
    lateness_us = sum(median(sorted(waits)[1:]) for waits in late if waits[rank] == 0.0)
    return LastRank(rank, count, len(late), lateness_us, chance)


def _matched(capture: Sequence[Measures]) -> list[list[float]]:
    """Durations by rank of each call that all ranks have: the n-th of its name in its step."""
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


def _waits(durations: Sequence[float]) -> list[float]:
    shortest = min(durations)
    return [us - shortest for us in durations]
