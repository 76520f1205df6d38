"""Nodes, links and rails: what is slow where several ranks have it together."""

from __future__ import annotations

from pathlib import Path

from tests.diagnosis.traces import LATEST_US, RANKS, rank_trace
from tests.diagnosis.traces import TraceFile as Trace
from warpwatch_diagnosis.diagnosis import diagnose

NODES = {0: "gpu-1", 1: "gpu-1", 2: "gpu-2", 3: "gpu-2"}


def test_ranks_of_one_node_that_are_late_by_turns_are_a_slow_node(tmp_path: Path) -> None:
    # Each of the two alone brings half of the lateness: none is the straggler.
    ranks = [rank_trace(rank) for rank in range(RANKS)]
    for rank in (2, 3):
        late = rank_trace(rank, late_us=LATEST_US)
        ranks[rank].events = [
            (late if (step % 2) == rank - 2 else ranks[rank]).events[step * 6 + number]
            for step in range(4)
            for number in range(6)
        ]
    paths = [trace.write(tmp_path / f"rank{rank}.json") for rank, trace in enumerate(ranks)]
    assert [f.kind for f in diagnose(paths).findings] == []
    (finding,) = diagnose(paths, nodes=NODES).findings
    assert (finding.kind, finding.rank, finding.node) == ("straggler", None, "gpu-2")
    assert finding.evidence[0].startswith("node gpu-2 keeps the others waiting")
    assert "that one of the 2 ranks of node gpu-2 enters last" in finding.evidence[0]


def rail(rank: int, transfer_us: float) -> Trace:
    """One of eight ranks; rank k and k + 4 share a rail, each a group of its own."""
    trace = rank_trace(rank, transfer_us=transfer_us)
    for event in trace.events:
        given = event.get("args", {})
        if "Group size" in given:
            given |= {"Group size": 2, "Process Group Name": f"rail{rank % 4}"}
    return trace


def test_a_slow_rail_is_named_by_its_ranks_and_nodes(tmp_path: Path) -> None:
    slow = [rail(rank, 5000 if rank % 4 == 3 else 1500) for rank in range(8)]
    paths = [trace.write(tmp_path / f"rank{rank}.json") for rank, trace in enumerate(slow)]
    nodes = {rank: f"gpu-{1 + rank // 4}" for rank in range(8)}
    said = " ".join(e for f in diagnose(paths, nodes=nodes).findings for e in f.evidence)
    assert (
        "the same transfer takes 1.8 times as long among rank 3 on gpu-1, rank 7 on gpu-2 as in "
        "the other groups (8.00 ms against 4.50 ms): look for a slow link between them"
    ) in said
    even = [rail(rank, 1500) for rank in range(8)]
    paths = [trace.write(tmp_path / f"rank{rank}.json") for rank, trace in enumerate(even)]
    said = " ".join(e for f in diagnose(paths, nodes=nodes).findings for e in f.evidence)
    assert "slow link" not in said
