"""A slow link, rail or node: one group of ranks moves the same bytes slower than groups like it.

A job's groups of one kind (data-parallel groups of each tensor-parallel rank, say) send as much at
the same time over different links. Their transfers are compared, in which no rank waits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import median

from warpwatch_diagnosis.comparison.alignment import Alignment
from warpwatch_diagnosis.measures.measures import Measures

# Groups to tell what is usual, and by how much one must be slower than it (our own values).
MIN_GROUPS = 3
MIN_COUNT = 3
MIN_RATIO = 1.5
_SHOWN = 8


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
    named = ", ".join(capture[rank].label for rank in members[:_SHOWN])
    more = f" and {len(members) - _SHOWN} more" if len(members) > _SHOWN else ""
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
