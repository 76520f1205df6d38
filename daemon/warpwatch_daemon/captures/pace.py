"""How far the ranks of a job are: what the start step of a capture is chosen by."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import NamedTuple

from warpwatch_daemon.ranks.rank import Rank

# No rank is further ahead of its peers than this, whatever it says.
MAX_AHEAD_STEPS = 1000


class Pace(NamedTuple):
    """begun: the newest step that the fastest rank has begun. step_s: its median; 0: not known."""

    begun: int
    step_s: float


def fastest(begun: Iterable[int]) -> int:
    """Ranks step together: one far from the median is no measure for the others."""
    known = sorted(begun)
    middle = known[(len(known) - 1) // 2]
    return max(step for step in known if step <= middle + MAX_AHEAD_STEPS)


def median_step_s(ranks: Iterable[Rank], choose: Callable[[list[float]], float]) -> float:
    """The median step seconds of the fastest (min) or slowest (max) rank; 0: not known."""
    recent = [list(rank.recent) for rank in ranks]
    return choose([statistics.median(steps_s) for steps_s in recent if steps_s] or [0.0])
