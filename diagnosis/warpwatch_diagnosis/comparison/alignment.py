"""Several ranks of one capture on one time axis, and who waited for whom in their collectives.

A collective begins on a rank when that rank arrives and ends on all ranks at nearly the same time.
So the difference between the ends of the same collective on two ranks is the difference between
their clocks: a rank's offset is the median of it over all collectives. And whoever arrives last
runs the shortest kernel: its duration is the transfer, what the others' kernels take longer is
waiting for it.

The same collective has the same process group and sequence number. Where the trace does not have
them, it is the n-th call of its name in its group and step, if the step has as many calls of it on
every rank. Sends and receives between two ranks are left out: they end when both partners are done.
A kernel of sends and receives of which the trace says no more is an all-to-all where all ranks of a
capture of several leave it together.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median
from typing import Any

from warpwatch_diagnosis.measures.collectives import Collective
from warpwatch_diagnosis.measures.gpu_events import ALL_TO_ALL
from warpwatch_diagnosis.measures.intervals import (
    Interval,
    Intervals,
    clip,
    difference,
    total,
    union,
)
from warpwatch_diagnosis.measures.measures import Measures

# Ends of one collective further apart than this and half of its shortest kernel: not the same one.
MAX_END_SPREAD_US = 500.0
MAX_END_SPREAD_SHARE = 0.5
# An unnamed kernel of sends and receives is an all-to-all of at least so many ranks if their ends
# are no further apart than this and this share of its shortest kernel.
MIN_EXCHANGING = 4
MAX_EXCHANGE_SPREAD_US = 50.0
MAX_EXCHANGE_SPREAD_SHARE = 0.05
# With fewer agreeing collectives than this share, ranks were not matched rightly.
MIN_AGREEING_SHARE = 0.5
SHOWN = 20
_POINT_TO_POINT = re.compile(
    r"^(nccl:)?(send|recv|isend|irecv|coalesced)\b|SendRecv", re.IGNORECASE
)
# How much of the bytes crosses each link (nccl-tests, doc/PERFORMANCE.md), by the number of ranks.
_BUS_FACTORS = {"allreduce": 2.0, "allgather": 1.0, "reducescatter": 1.0, "alltoall": 1.0}

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class MatchedCollective:
    """One collective on the ranks that took part; ranks are indices into the capture.

    begins_us: by rank, on its own clock. transfer_us: duration on the rank that came last.
    waits_us: by rank, what it waited for that one. skew_us: last arrival less first one, on the
    aligned clocks. bytes, group_size (all ranks of the process group): None where unknown.
    """

    name: str
    process_group: str | None
    bytes: int | None
    ranks: tuple[int, ...]
    begins_us: tuple[float, ...]
    waits_us: tuple[float, ...]
    transfer_us: float
    skew_us: float
    group_size: int | None = None

    @property
    def last(self) -> int:
        """The rank that all others waited for."""
        return self.ranks[self.waits_us.index(0.0)]

    @property
    def lateness_us(self) -> float:
        """How much longer the typical other rank was in it than the last one."""
        return median(sorted(self.waits_us)[1:]) if len(self.waits_us) > 1 else 0.0

    @property
    def algorithm_gb_per_s(self) -> float | None:
        """Bytes by the time of the transfer, 1 GB = 1e9 bytes."""
        return self.bytes / self.transfer_us / 1e3 if self.bytes and self.transfer_us else None

    @property
    def bus_gb_per_s(self) -> float | None:
        """What a link carries: comparable with its data sheet whatever the number of ranks.

        None unless all ranks of the group are here: one of the others may have come last.
        """
        rate, ranks = self.algorithm_gb_per_s, self.group_size
        if rate is None or not ranks or len(self.ranks) < ranks:
            return None
        name = re.sub(r"[^a-z]", "", self.name.lower())
        factor = next((f for known, f in _BUS_FACTORS.items() if known in name), None)
        return rate if factor is None else rate * factor * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class Alignment:
    """offsets_us: by rank index, what its clock is ahead of the first one's. unmatched: collectives
    of single ranks that no other one has, counted on each.
    """

    matched: tuple[MatchedCollective, ...]
    offsets_us: tuple[float, ...]
    unmatched: int

    def waits(self, rank: int, window: Interval) -> Intervals:
        """When the rank was in a collective that others had not reached, on its own clock."""
        found = []
        for collective in self.matched:
            if rank in collective.ranks:
                index = collective.ranks.index(rank)
                begin_us = collective.begins_us[index]
                found.append((begin_us, begin_us + collective.waits_us[index]))
        return union(clip(found, window))

    def blamed_us(self, rank: int) -> float:
        """How long the others typically waited in the collectives that this rank entered last."""
        return sum(m.lateness_us for m in self.matched if m.last == rank)

    def by_name(self) -> list[dict[str, Any]]:
        """Sums by name, group and size, longest transfer first, at most SHOWN."""
        groups: dict[tuple[str, str | None, int | None], list[MatchedCollective]]
        groups = defaultdict(list)
        for collective in self.matched:
            key = collective.name, collective.process_group, collective.bytes
            groups[key].append(collective)
        rows = [_row(found) for found in groups.values()]
        rows.sort(key=lambda row: (-row["transfer_us"], row["name"], row["bytes"] or 0))
        return rows[:SHOWN]

    def to_json(self) -> dict[str, Any]:
        """The key ``collectives`` of a diagnosis."""
        return {
            "matched": len(self.matched),
            "unmatched": self.unmatched,
            "clock_offsets_us": [round(us, 3) for us in self.offsets_us],
            "by_name": self.by_name(),
        }


def _row(found: list[MatchedCollective]) -> dict[str, Any]:
    rates = [m.algorithm_gb_per_s for m in found if m.algorithm_gb_per_s is not None]
    bus = [m.bus_gb_per_s for m in found if m.bus_gb_per_s is not None]
    return {
        "name": found[0].name,
        "process_group": found[0].process_group,
        "bytes": found[0].bytes,
        "ranks": max(len(m.ranks) for m in found),
        "count": len(found),
        "transfer_us": round(sum(m.transfer_us for m in found), 3),
        "wait_us": round(sum(m.lateness_us for m in found), 3),
        "median_skew_us": round(median(m.skew_us for m in found), 3),
        "algorithm_gb_per_s": round(median(rates), 3) if rates else None,
        "bus_gb_per_s": round(median(bus), 3) if bus else None,
    }


def align(capture: Sequence[Measures]) -> Alignment | None:
    """None for fewer than two ranks with a GPU, and where their collectives do not match."""
    if len(capture) < 2 or any(m.gpu is None for m in capture):
        return None
    common: dict[Key, dict[int, Collective]] = defaultdict(dict)
    for rank, measures in enumerate(capture):
        for key, collective in _keyed(measures):
            common[key][rank] = collective
    shared = [found for found in common.values() if _is_shared(found, len(capture))]
    offsets = _offsets(shared, len(capture))
    shared = [found for found in shared if _is_named(found) or _is_exchange(found, offsets)]
    agreeing = [found for found in shared if _agree(found, offsets)]
    if not agreeing or len(agreeing) < MIN_AGREEING_SHARE * len(shared):
        return None
    matched = [_matched(found, offsets) for found in agreeing]
    matched.sort(key=lambda m: (m.begins_us[0] - offsets[m.ranks[0]], m.name))
    met = sum(len(m.ranks) for m in matched)
    return Alignment(tuple(matched), tuple(offsets), sum(map(len, common.values())) - met)


def exposed_transfer_us(measures: Measures, rank: int, alignment: Alignment) -> float:
    """Exposed communication without the waiting for other ranks, which is how a kernel begins."""
    exposed = measures.gpu.exposed_communication if measures.gpu else []
    return total(difference(exposed, alignment.waits(rank, measures.window)))


def _keyed(measures: Measures) -> list[tuple[Key, Collective]]:
    groups: dict[Key, list[Collective]] = defaultdict(list)
    for collective in measures.gpu.collectives if measures.gpu else ():
        if not collective.is_named or not _between_two(collective):
            groups[_group(collective, measures)].append(collective)
    return [
        ((*group, nth) if group[0] == "sequence" else (*group, len(found), nth), collective)
        for group, found in groups.items()
        for nth, collective in enumerate(found)
    ]


def _between_two(collective: Collective) -> bool:
    name = collective.name
    return _POINT_TO_POINT.search(name) is not None and not ALL_TO_ALL.search(name)


def _group(collective: Collective, measures: Measures) -> Key:
    """Its process group and sequence number; without one, its group and step."""
    name, group = collective.name, collective.process_group
    if collective.sequence is not None:
        return ("sequence", group, collective.sequence, name)
    at_us = collective.begin_us if collective.launched_us is None else collective.launched_us
    index = bisect_right(measures.steps, at_us, key=itemgetter(0)) - 1
    step = measures.per_step[index].number if index >= 0 else None
    return ("step", group, step, name)


def _is_named(found: Mapping[int, Collective]) -> bool:
    return all(collective.is_named for collective in found.values())


def _is_shared(found: Mapping[int, Collective], ranks: int) -> bool:
    """By at least two ranks, and not by groups of the same name on different ranks."""
    if not _is_named(found):
        return len(found) == ranks >= MIN_EXCHANGING
    sizes = {c.group_size for c in found.values()} - {None}
    return len(found) > 1 and all(size is None or len(found) <= size for size in sizes)


def _offsets(shared: Sequence[Mapping[int, Collective]], ranks: int) -> list[float]:
    """Rank by rank, from those whose offset is known; 0 for who shares nothing with them."""
    known = {0: 0.0}
    while True:
        seen: dict[int, list[float]] = defaultdict(list)
        for found in shared:
            reference = next((rank for rank in found if rank in known), None)
            if reference is None:
                continue
            end_us = found[reference].end_us - known[reference]
            for rank in found.keys() - known.keys():
                seen[rank].append(found[rank].end_us - end_us)
        if not seen:
            return [known.get(rank, 0.0) for rank in range(ranks)]
        known |= {rank: median(differences) for rank, differences in seen.items()}


def _agree(found: Mapping[int, Collective], offsets: Sequence[float]) -> bool:
    spread_us, shortest_us = _spread_us(found, offsets)
    return spread_us <= MAX_END_SPREAD_US + MAX_END_SPREAD_SHARE * shortest_us


def _is_exchange(found: Mapping[int, Collective], offsets: Sequence[float]) -> bool:
    spread_us, shortest_us = _spread_us(found, offsets)
    return spread_us <= MAX_EXCHANGE_SPREAD_US + MAX_EXCHANGE_SPREAD_SHARE * shortest_us


def _spread_us(found: Mapping[int, Collective], offsets: Sequence[float]) -> tuple[float, float]:
    """How far its ends are apart, and its shortest kernel."""
    ends = [c.end_us - offsets[rank] for rank, c in found.items()]
    return max(ends) - min(ends), min(c.end_us - c.begin_us for c in found.values())


def _matched(found: Mapping[int, Collective], offsets: Sequence[float]) -> MatchedCollective:
    ranks = tuple(sorted(found))
    durations = [found[rank].end_us - found[rank].begin_us for rank in ranks]
    arrivals = [found[rank].begin_us - offsets[rank] for rank in ranks]
    sizes = [c.bytes for c in found.values() if c.bytes]
    first = found[ranks[0]]
    return MatchedCollective(
        name=first.name,
        process_group=first.process_group,
        bytes=max(sizes) if sizes else None,
        ranks=ranks,
        begins_us=tuple(found[rank].begin_us for rank in ranks),
        waits_us=tuple(us - min(durations) for us in durations),
        transfer_us=min(durations),
        skew_us=max(arrivals) - min(arrivals),
        group_size=max((c.group_size or 0 for c in found.values()), default=0) or None,
    )


# Groups to tell what is usual, and by how much one must be slower than it (our own values).
MIN_GROUPS = 3
MIN_COUNT = 3
MIN_RATIO = 1.5
_SHOWN_RANKS = 8


def slow_links(
    capture: Sequence[Measures], alignment: Alignment | None, ranks: Sequence[int] = ()
) -> list[str]:
    """A sentence on the slowest group, if it is slow and has one of ``ranks``; empty: of any."""
    alike: dict[tuple[object, ...], dict[tuple[int, ...], list[float]]]
    alike = defaultdict(lambda: defaultdict(list))
    for one in alignment.matched if alignment else ():
        if one.group_size in (None, len(one.ranks)):
            key = (one.name, one.bytes, len(one.ranks))
            alike[key][one.ranks].append(one.transfer_us)
    found = [worst for groups in alike.values() if (worst := _slowest(groups))]
    if not found:
        return []
    ratio, members, mine_us, usual_us = max(found)
    if ranks and not set(ranks) & set(members):
        return []
    named = ", ".join(capture[rank].label for rank in members[:_SHOWN_RANKS])
    more = f" and {len(members) - _SHOWN_RANKS} more" if len(members) > _SHOWN_RANKS else ""
    nodes = {capture[rank].node for rank in members}
    where = "on this node" if len(nodes) == 1 and None not in nodes else "between them"
    return [
        f"the same transfer takes {ratio:.1f} times as long among {named}{more} as in the other "
        f"groups ({mine_us / 1e3:,.2f} ms against {usual_us / 1e3:,.2f} ms): look for a slow link "
        f"{where}"
    ]


def _slowest(
    groups: dict[tuple[int, ...], list[float]],
) -> tuple[float, tuple[int, ...], float, float] | None:
    """How many times slower it is, its ranks, its typical transfer and the others'."""
    typical = sorted(
        (median(times), ranks) for ranks, times in groups.items() if len(times) >= MIN_COUNT
    )
    if len(typical) < MIN_GROUPS:
        return None
    (slowest_us, ranks), usual_us = typical[-1], median(us for us, _ in typical[:-1])
    if not usual_us or slowest_us < MIN_RATIO * usual_us:
        return None
    return slowest_us / usual_us, ranks, slowest_us, usual_us
