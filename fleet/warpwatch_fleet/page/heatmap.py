"""Ranks by node, each a cell: how long a step takes the rank itself, and how long it waits."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from warpwatch_runtime.quantities import seconds, text
from warpwatch_serving.page.jobs import SLOW, RankedJob, own_times, step_s
from warpwatch_telemetry.state import RankState

# The worst jobs; the others are rows.
MAX_MAPS = 3
# Ranks of all maps on the page.
MAX_CELLS = 4096
# If a job has at most this many ranks and its map is the only one, cells have space for words.
MAX_LARGE = 48
# Colours begin here: of a rank's own time by the job's median, of its waiting by its step.
OWN_LEVELS = (1.05, 1.1, 1.2, 1.4, 1.8)
WAIT_LEVELS = (0.05, 0.1, 0.2, 0.35, 0.5)


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
    """nodes: cells by name, in the order of their ranks. large: whether cells have words.

    waits: whether it is known how long ranks wait.
    """

    nodes: dict[str, list[Cell]]
    large: bool
    waits: bool


def maps(found: Sequence[RankedJob]) -> list[tuple[RankedJob, HeatMap]]:
    """Return maps of the first jobs: of the only ones, or else of those with a rank in trouble."""
    few = len(found) <= MAX_MAPS
    drawn: list[tuple[RankedJob, HeatMap]] = []
    left = MAX_CELLS
    for one in found[:MAX_MAPS]:
        left -= len(one.ranks)
        if left < 0 or not (few or one.named or one.is_slow):
            break
        large = len(found) == 1 and len(one.ranks) <= MAX_LARGE
        drawn.append((one, heat_map(one.ranks, one.named, large=large)))
    return drawn


def heat_map(ranks: Sequence[RankState], named: set[int], *, large: bool) -> HeatMap:
    own_s = own_times(ranks)
    median_s = statistics.median(own_s.values()) if own_s else 0.0
    nodes: dict[str, list[Cell]] = {}
    for one in ranks:
        cell = _cell(one, own_s.get(one.rank), median_s, one.rank in named)
        nodes.setdefault(text(one.host, 40), []).append(cell)
    return HeatMap(nodes, large, waits=any(one.comm_s is not None for one in ranks))


def _cell(rank: RankState, own_s: float | None, median_s: float, marked: bool) -> Cell:
    took, wait_s = step_s(rank), rank.comm_s if own_s is not None else None
    own = wait = None
    if own_s is not None and median_s:
        own = bisect.bisect_right(OWN_LEVELS, own_s / median_s)
    if wait_s is not None and took:
        wait = bisect.bisect_right(WAIT_LEVELS, wait_s / took)
    status = rank.status if rank.status in ("running", "stopped", "exited", "died") else "stopped"
    return Cell(rank.rank, status, own, wait, seconds(own_s), seconds(wait_s), marked)


def slow_nodes(found: HeatMap) -> set[str]:
    """Return the nodes with a slow rank."""
    return {name for name, cells in found.nodes.items() if any(map(_is_slow, cells))}


def _is_slow(cell: Cell) -> bool:
    slow = cell.own is not None and cell.own > OWN_LEVELS.index(SLOW)
    return slow or cell.marked or cell.status in ("stopped", "died")
