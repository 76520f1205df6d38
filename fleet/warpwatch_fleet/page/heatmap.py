"""Ranks by node, each a cell: what a step takes the rank itself, and how long it waits for others.

In a synchronous job all ranks step together, so the step time alone tells them apart as little as
their waiting does: who is slow works longer and waits less than the others.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from warpwatch_daemon.http.page import jobs
from warpwatch_daemon.quantities import plural, seconds, text
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.state import JobState, RankState, State

# Ranks of one map, and of all on the page.
MAX_CELLS = 4096
# With more, a cell has no room for words.
MAX_LARGE = 48
# Colours begin here: of a rank's own time by the job's median, of its waiting by its step.
OWN_LEVELS = (1.05, 1.1, 1.2, 1.4, 1.8)
WAIT_LEVELS = (0.05, 0.1, 0.2, 0.35, 0.5)
# A rank that is slower than the median by less is like the others.
SLOW = 1.2


@dataclass(frozen=True, slots=True)
class Cell:
    """own, wait: levels of colour, None where they are not known. own_s, wait_s: for people."""

    rank: int
    status: str
    own: int | None
    wait: int | None
    own_s: str
    wait_s: str
    marked: bool

    @property
    def classes(self) -> str:
        own = "" if self.own is None else f"own-{self.own}"
        wait = own.replace("own", "same") if self.wait is None else f"wait-{self.wait}"
        ended = "" if self.status == "running" else f"is-{self.status}"
        return " ".join(filter(None, (own, wait, ended, "marked" if self.marked else "")))

    @property
    def title(self) -> str:
        ended = "" if self.status == "running" else f", {self.status}"
        return f"rank {self.rank}: {self.own_s} itself, waits {self.wait_s}{ended}"


@dataclass(frozen=True, slots=True)
class HeatMap:
    """nodes: by name, in the order of their ranks. sentence: what to see in it.

    waits: whether it is known how long ranks wait.
    """

    nodes: dict[str, list[Cell]]
    sentence: str
    is_slow: bool
    large: bool
    waits: bool


def listed(state: State) -> list[tuple[JobState, list[RankState], HeatMap | None]]:
    """Jobs with an anomaly first, then those that run; maps as far as there is room."""
    named: dict[JobId, set[int]] = {}
    for one in state.anomalies:
        if one.end_time is None and one.job_id is not None:
            named.setdefault(one.job_id, set()).add(-1 if one.rank is None else one.rank)
    ranks: dict[JobId, list[RankState]] = {}
    for rank in state.ranks:
        ranks.setdefault(rank.job_id, []).append(rank)

    def order(job: JobState) -> tuple[bool, bool]:
        runs = any(rank.status == "running" for rank in ranks.get(job.job_id, ()))
        return job.job_id not in named, not runs

    found: list[tuple[JobState, list[RankState], HeatMap | None]] = []
    left = MAX_CELLS
    for job in sorted(state.jobs, key=order)[: jobs.MAX_JOBS]:
        of_job = ranks.get(job.job_id, [])
        left -= len(of_job)
        has_room = left >= 0
        of_job_map = heat_map(of_job, named.get(job.job_id, set())) if has_room else None
        found.append((job, of_job, of_job_map))
    return found


def heat_map(ranks: Sequence[RankState], named: set[int]) -> HeatMap:
    own_s = {one.rank: own for one in ranks if (own := _own_s(one)) is not None}
    median_s = statistics.median(own_s.values()) if own_s else 0.0
    nodes: dict[str, list[Cell]] = {}
    for one in ranks:
        cell = _cell(one, own_s.get(one.rank), median_s, one.rank in named)
        nodes.setdefault(text(one.host, 40), []).append(cell)
    sentence, is_slow = _sentence(ranks, own_s, median_s)
    return HeatMap(
        nodes,
        sentence,
        is_slow,
        large=len(ranks) <= MAX_LARGE,
        waits=any(one.comm_s is not None for one in ranks),
    )


def _step_s(rank: RankState) -> float | None:
    return 1 / rank.steps_per_s if rank.steps_per_s else None


def _own_s(rank: RankState) -> float | None:
    """A step without its waiting; all of it where that is not known."""
    step_s = _step_s(rank)
    return None if step_s is None else max(0.0, step_s - (rank.comm_s or 0.0))


def _cell(rank: RankState, own_s: float | None, median_s: float, marked: bool) -> Cell:
    step_s, wait_s = _step_s(rank), rank.comm_s if own_s is not None else None
    own = wait = None
    if own_s is not None and median_s:
        own = bisect.bisect_right(OWN_LEVELS, own_s / median_s)
    if wait_s is not None and step_s:
        wait = bisect.bisect_right(WAIT_LEVELS, wait_s / step_s)
    status = rank.status if rank.status in ("running", "stopped", "exited", "died") else "stopped"
    return Cell(rank.rank, status, own, wait, seconds(own_s), seconds(wait_s), marked)


def _sentence(
    ranks: Sequence[RankState], own_s: dict[int, float], median_s: float
) -> tuple[str, bool]:
    """The slowest rank by name, and whether it is slow."""
    hosts = {one.rank: text(one.host, 40) for one in ranks}
    gone = [one for one in ranks if one.status in ("stopped", "died")]
    if gone:
        state = {"died": "has died", "stopped": "does not move"}[gone[0].status]
        more = f", and {plural(len(gone) - 1, 'more rank')}" if len(gone) > 1 else ""
        return f"Rank {gone[0].rank} on {hosts[gone[0].rank]} {state}{more}", True
    if not median_s:
        return "", False
    slowest = max(own_s, key=lambda rank: own_s[rank])
    ratio = own_s[slowest] / median_s
    if ratio < SLOW:
        return f"All alike: {seconds(median_s)} of a rank's own at the median", False
    waits = [one.comm_s for one in ranks if one.comm_s is not None and one.rank != slowest]
    waiting = f"; the others wait {seconds(statistics.median(waits))}" if waits else ""
    return (
        f"Rank {slowest} on {hosts[slowest]} is the slowest: {seconds(own_s[slowest])} itself, "
        f"{ratio:.1f} times the median of {seconds(median_s)}{waiting}"
    ), True


def slow_nodes(found: HeatMap) -> set[str]:
    """Those with a rank to look at."""
    return {name for name, cells in found.nodes.items() if any(map(_is_slow, cells))}


def _is_slow(cell: Cell) -> bool:
    slow = cell.own is not None and cell.own > OWN_LEVELS.index(SLOW)
    return slow or cell.marked or cell.status in ("stopped", "died")
