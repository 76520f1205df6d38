"""Which rank on the CPU comes last to the collectives: its own are the shortest.

Whoever comes last waits for nobody, so no clocks are compared. That one rank does so again and
again in a single step is no chance; that it does so once or twice may be.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import median

from warpwatch_diagnosis.measures.measures import Measures

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
