"""Which ranks of a job over nodes are captured where nobody has said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

# More traces than a person compares, and as many exports at a time as a shared disk stands.
MAX_RANKS = 16
# Enough to tell what is usual.
PEERS = 3


def spread(nodes: Mapping[int, str], count: int) -> tuple[int, ...]:
    """``count`` of these ranks, over as many nodes as there are."""
    before: Counter[str] = Counter()
    turns = []
    for rank, node in sorted(nodes.items()):
        turns.append((before[node], rank))
        before[node] += 1
    return tuple(sorted(rank for _, rank in sorted(turns)[:count]))


def choose(nodes: Mapping[int, str], named: Collection[int]) -> tuple[int, ...]:
    """All of a small job; else those that are named and three peers, each of another node.

    ``nodes``: of each live rank. Where nobody is named it is one rank a node, MAX_RANKS in all.
    """
    if len(nodes) <= MAX_RANKS:
        return tuple(sorted(nodes))
    chosen = sorted(nodes.keys() & set(named))[: MAX_RANKS - PEERS]
    count = len(chosen) + PEERS if chosen else MAX_RANKS
    seen = {nodes[rank] for rank in chosen}
    for rank, node in sorted(nodes.items()):
        if node not in seen and len(chosen) < count:
            seen.add(node)
            chosen.append(rank)
    return tuple(sorted(chosen))
