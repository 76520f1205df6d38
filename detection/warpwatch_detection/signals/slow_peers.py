"""The limit beyond which a rank is slower than ranks that do the same work, without any past.

A one-sided outlier test: the slowest ranks against the scatter of all others (the generalized
extreme Studentized deviate, Rosner, Technometrics 25, 1983), with the variance moderated by what
healthy GPUs differ by (Smyth, Statistical Applications in Genetics and Molecular Biology 3, 2004),
so that three ranks are enough to judge one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from warpwatch_detection.signals.level_shift import student

# Healthy GPUs of one job differ by 2 % (standard deviation; 9 % from the fastest to the slowest of
# thousands in PRISM, arXiv 2510.15596). It counts as much as four ranks that were measured.
PRIOR_SPREAD = 0.02
PRIOR_WEIGHT = 4
# Slow ranks that are told from the others at most, and as a share of all: eight GPUs of two nodes.
MAX_SLOW = 16
MAX_SLOW_SHARE = 1 / 4
# A lone rank is twice as far above the middle as the next one; two alike may be a stage.
LONE_FACTOR = 2.0


def peer_limit(
    levels: Mapping[int, float],
    groups: Mapping[int, int],
    deviations: float,
    error: float,
    are_alike: bool,
) -> float:
    """Return the limit of ``levels``, logs of the ratio of each rank to its peers.

    deviations: of normal noise that one healthy rank may pass; error: the standard error of a
    level. are_alike: ranks of a group are known to do the same work; else one rank at most is slow,
    and two ranks are not compared: they may be two stages. Infinite if there are too few ranks.
    """
    least = 2 if are_alike else 3
    if len(levels) < least:
        return math.inf
    ordered = sorted(levels, key=levels.__getitem__, reverse=True)
    scatter = _Scatter(levels, groups)
    most = min(MAX_SLOW, int(len(levels) * MAX_SLOW_SHARE)) if are_alike else 1
    found = math.inf
    for rank in ordered[: max(1, most)]:
        peers = scatter.without(rank)
        limit = scatter.limit(deviations, error) * math.sqrt(1 + 1 / max(peers, 1))
        if found == math.inf or levels[rank] >= limit:
            found = limit
    return found if are_alike else max(found, LONE_FACTOR * levels[ordered[1]])


class _Scatter:
    """The variance within groups of ranks, from which the slowest are taken one by one."""

    def __init__(self, levels: Mapping[int, float], groups: Mapping[int, int]) -> None:
        self._levels, self._groups = levels, groups
        # Per group: ranks, sum and sum of squares of their levels.
        self._sums: dict[int, tuple[int, float, float]] = {}
        self._squares, self._freedom = 0.0, 0
        for rank in levels:
            self._change(rank, 1)

    def without(self, rank: int) -> int:
        """Take a rank out. Return how many are left in its group."""
        self._change(rank, -1)
        return self._sums[self._groups.get(rank, 0)][0]

    def limit(self, deviations: float, error: float) -> float:
        weight = PRIOR_WEIGHT + self._freedom
        prior = PRIOR_WEIGHT * PRIOR_SPREAD * PRIOR_SPREAD
        spread = math.sqrt((prior + max(self._squares, 0.0)) / weight)
        return student(deviations, weight + 1) * max(spread, error)

    def _change(self, rank: int, sign: int) -> None:
        group, level = self._groups.get(rank, 0), self._levels[rank]
        count, total, squares = self._sums.get(group, (0, 0.0, 0.0))
        self._squares -= _about_mean(count, total, squares)
        self._freedom -= max(count - 1, 0)
        count, total, squares = count + sign, total + sign * level, squares + sign * level * level
        self._sums[group] = (count, total, squares)
        self._squares += _about_mean(count, total, squares)
        self._freedom += max(count - 1, 0)


def _about_mean(count: int, total: float, squares: float) -> float:
    return squares - total * total / count if count else 0.0
