"""Puts the ranks of one capture on one time axis, and finds waits, late ranks and slow links.

A collective ends on all ranks at nearly the same time, so the difference between the ends of the
same collective on two ranks is that of their clocks. A rank's offset is the median over all
collectives. The last rank to arrive runs the shortest kernel: its duration is the transfer, and the
surplus of the others' kernels is waiting for it.

The same collective has the same process group and sequence number. If the trace does not have them,
it is the n-th call of its name in its group and step. This needs as many calls of it on every rank
in that step. Sends and receives between two ranks are ignored: they end when both partners are
done. An unnamed kernel of sends and receives is an all-to-all if all ranks leave it together.
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

from warpwatch_diagnosis.intervals import Intervals, clip, difference, intersection, total, union
from warpwatch_diagnosis.measures.gpu_time import Collective
from warpwatch_diagnosis.measures.gpu_work import ALL_TO_ALL, TOP
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.trace.events import grouped
from warpwatch_diagnosis.words import listed

# Kernels whose ends are further apart than this, plus half of the shortest one, are not the same
# collective.
MAX_END_SPREAD_US = 500.0
MAX_END_SPREAD_SHARE = 0.5
# An unnamed kernel of sends and receives is an all-to-all of at least this many ranks if they all
# end within this time, plus this share of the shortest one.
MIN_EXCHANGING = 4
MAX_EXCHANGE_SPREAD_US = 50.0
MAX_EXCHANGE_SPREAD_SHARE = 0.05
# If fewer collectives agree, the ranks were matched wrongly.
MIN_AGREEING_COLLECTIVES = 0.5
# A group is slow if it is slower by this ratio than at least two others; each needs this many
# transfers (our own values).
MIN_GROUPS = 3
MIN_COUNT = 3
MIN_RATIO = 1.5


_POINT_TO_POINT = re.compile(
    r"^(nccl:)?(send|recv|isend|irecv|coalesced)\b|SendRecv", re.IGNORECASE
)
# The part of the bytes that crosses each link, by the number of ranks (nccl-tests,
# doc/PERFORMANCE.md).
_BUS_FACTORS = {"allreduce": 2.0, "allgather": 1.0, "reducescatter": 1.0, "alltoall": 1.0}

Key = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class MatchedCollective:
    """One collective on the ranks that took part; ranks are indices into the capture.

    begins_us, waits_us: by rank, on its own clock, the begin and the waiting for the last one.
    transfer_us: duration on the last rank. skew_us: last arrival less first one, on the aligned
    clocks. group_size: the ranks of the process group. Unknown fields are None.
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
        """The waiting of the typical other rank."""
        return median(sorted(self.waits_us)[1:]) if len(self.waits_us) > 1 else 0.0

    @property
    def algorithm_gb_per_s(self) -> float | None:
        """Bytes by the time of the transfer, 1 GB = 1e9 bytes."""
        return self.bytes / self.transfer_us / 1e3 if self.bytes and self.transfer_us else None

    @property
    def bus_gb_per_s(self) -> float | None:
        """The rate of a link, comparable with its data sheet for any number of ranks.

        None unless all ranks of the group are in the capture: another one may have come last.
        """
        rate, ranks = self.algorithm_gb_per_s, self.group_size
        if rate is None or not ranks or len(self.ranks) < ranks:
            return None
        name = re.sub(r"[^a-z]", "", self.name.lower())
        factor = next((f for known, f in _BUS_FACTORS.items() if known in name), None)
        return rate if factor is None else rate * factor * (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class Alignment:
    """The matched collectives of a capture, and its clocks.

    ranks: the capture. offsets_us: by rank index, the lead of its clock over the first one's.
    unmatched: collectives that only one rank has, counted on each.
    """

    ranks: tuple[Measures, ...]
    matched: tuple[MatchedCollective, ...]
    offsets_us: tuple[float, ...]
    unmatched: int

    def offset_us(self, measures: Measures) -> float | None:
        """Return the lead of the rank's clock over the first one's; None if it is not aligned."""
        known = zip(self.ranks, self.offsets_us, strict=True)
        return next((offset_us for rank, offset_us in known if rank is measures), None)

    def waits(self, measures: Measures) -> Intervals:
        """Return when the rank was in collectives that others had not reached, on its clock."""
        found = [
            (begin_us, begin_us + wait_us)
            for m in self.matched
            for rank, begin_us, wait_us in zip(m.ranks, m.begins_us, m.waits_us, strict=True)
            if self.ranks[rank] is measures
        ]
        return union(clip(found, measures.window))

    def exposed_transfer_us(self, measures: Measures) -> float:
        """Return the exposed communication without waiting for others at the start of kernels."""
        exposed = measures.gpu.exposed_communication if measures.gpu else []
        return total(difference(exposed, self.waits(measures)))

    def exposed_wait_us(self, measures: Measures) -> float:
        """Return the exposed communication that is waiting for others."""
        exposed = measures.gpu.exposed_communication if measures.gpu else []
        return total(intersection(exposed, self.waits(measures)))

    def blamed_us(self, rank: int) -> float:
        """Return the others' typical waiting in the collectives that this rank entered last."""
        return sum(m.lateness_us for m in self.matched if m.last == rank)

    def by_name(self) -> list[dict[str, Any]]:
        """Return sums by name, group and size, longest transfer first, at most TOP."""
        groups = grouped(self.matched, lambda m: (m.name, m.process_group, m.bytes))
        rows = [_row(found) for found in groups.values()]
        rows.sort(key=lambda row: (-row["transfer_us"], row["name"], row["bytes"] or 0))
        return rows[:TOP]

    def to_json(self) -> dict[str, Any]:
        """Return the key ``collectives`` of a diagnosis."""
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
    """Align at least two ranks with GPUs; None if their collectives do not match."""
    if len(capture) < 2 or any(m.gpu is None for m in capture):
        return None
    common: dict[Key, dict[int, Collective]] = defaultdict(dict)
    for rank, measures in enumerate(capture):
        for key, collective in _keyed(measures):
            common[key][rank] = collective
    shared = [found for found in common.values() if _is_shared(found, len(capture))]
    offsets = _offsets(shared, len(capture))
    shared = [
        found
        for found in shared
        if _is_named(found)
        or _ends_within(found, offsets, MAX_EXCHANGE_SPREAD_US, MAX_EXCHANGE_SPREAD_SHARE)
    ]
    agreeing = [
        found
        for found in shared
        if _ends_within(found, offsets, MAX_END_SPREAD_US, MAX_END_SPREAD_SHARE)
    ]
    if not agreeing or len(agreeing) < MIN_AGREEING_COLLECTIVES * len(shared):
        return None
    matched = [_matched(found, offsets) for found in agreeing]
    matched.sort(key=lambda m: (m.begins_us[0] - offsets[m.ranks[0]], m.name))
    met = sum(len(m.ranks) for m in matched)
    unmatched = sum(map(len, common.values())) - met
    return Alignment(tuple(capture), tuple(matched), tuple(offsets), unmatched)


def _keyed(measures: Measures) -> list[tuple[Key, Collective]]:
    known = measures.gpu.collectives if measures.gpu else ()
    kept = (c for c in known if not (c.is_named and _is_between_two(c.name)))
    groups = grouped(kept, lambda collective: _group(collective, measures))
    return [
        ((*group, nth) if group[0] == "sequence" else (*group, len(found), nth), collective)
        for group, found in groups.items()
        for nth, collective in enumerate(found)
    ]


def _is_between_two(name: str) -> bool:
    return bool(_POINT_TO_POINT.search(name)) and not ALL_TO_ALL.search(name)


def _group(collective: Collective, measures: Measures) -> Key:
    """Return its process group and sequence number; without one, its group and step."""
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
    """Return whether several ranks share it, not groups of one name on different ranks."""
    if not _is_named(found):
        return len(found) == ranks >= MIN_EXCHANGING
    sizes = {c.group_size for c in found.values()} - {None}
    return len(found) > 1 and all(size is None or len(found) <= size for size in sizes)


def _offsets(shared: Sequence[Mapping[int, Collective]], ranks: int) -> list[float]:
    """Derive offsets from ranks with known ones; 0 for ranks that share nothing with them."""
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


def _ends_within(
    found: Mapping[int, Collective], offsets: Sequence[float], limit_us: float, share: float
) -> bool:
    """Return whether its ends are at most the limit, and a share of its shortest kernel, apart."""
    ends = [c.end_us - offsets[rank] for rank, c in found.items()]
    shortest_us = min(c.end_us - c.begin_us for c in found.values())
    return max(ends) - min(ends) <= limit_us + share * shortest_us


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


def slow_links(
    capture: Sequence[Measures], alignment: Alignment | None, ranks: Sequence[int] = ()
) -> list[str]:
    """Return a sentence on the slowest group, if it is slow and has one of ``ranks``, if any.

    A job's groups of one kind (data-parallel groups of each tensor-parallel rank, say) send as much
    at the same time over different links. Their transfers are compared, in which no rank waits.
    """
    alike: dict[tuple[object, ...], dict[tuple[int, ...], list[float]]]
    alike = defaultdict(lambda: defaultdict(list))
    for one in alignment.matched if alignment else ():
        if one.group_size in (None, len(one.ranks)):
            alike[one.name, one.bytes, len(one.ranks)][one.ranks].append(one.transfer_us)
    found = [worst for groups in alike.values() if (worst := _slowest(groups))]
    if not found:
        return []
    ratio, members, mine_us, usual_us = max(found)
    if ranks and not set(ranks) & set(members):
        return []
    named = listed([capture[rank].label for rank in members])
    nodes = {capture[rank].node for rank in members}
    where = "on this node" if len(nodes) == 1 and None not in nodes else "between them"
    return [
        f"the same transfer takes {ratio:.1f} times as long among {named} as in the other "
        f"groups ({mine_us / 1e3:,.2f} ms against {usual_us / 1e3:,.2f} ms): look for a slow link "
        f"{where}"
    ]


def _slowest(
    groups: dict[tuple[int, ...], list[float]],
) -> tuple[float, tuple[int, ...], float, float] | None:
    """Return the ratio, the ranks, and the typical transfers of a slow group and the others."""
    typical = sorted(
        (median(times), ranks) for ranks, times in groups.items() if len(times) >= MIN_COUNT
    )
    if len(typical) < MIN_GROUPS:
        return None
    (slowest_us, ranks), usual_us = typical[-1], median(us for us, _ in typical[:-1])
    if not usual_us or slowest_us < MIN_RATIO * usual_us:
        return None
    return slowest_us / usual_us, ranks, slowest_us, usual_us
