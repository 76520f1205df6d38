"""Several ranks together: their clocks, who waits for whom, and how fast the links are."""

from pathlib import Path

import pytest

from tests.diagnosis.captures import diagnosed, written
from tests.diagnosis.traces import LATEST_US, RANKS, STEP_US, TraceFile, rank_trace
from warpwatch_diagnosis.comparison.alignment import Alignment, align
from warpwatch_diagnosis.diagnosis import diagnose
from warpwatch_diagnosis.measures.intervals import total
from warpwatch_diagnosis.verdict.conclusion import Diagnosis


def aligned(found: Diagnosis) -> Alignment:
    assert found.alignment is not None
    return found.alignment


def one_late() -> list[TraceFile]:
    return [rank_trace(k, late_us=LATEST_US if k == 2 else 0) for k in range(RANKS)]


def test_the_last_one_is_the_straggler_and_its_kernel_the_transfer(tmp_path: Path) -> None:
    found = diagnosed(tmp_path, *one_late())
    assert [(f.kind, f.rank, f.share) for f in found.findings] == [("straggler", 2, 0.3)]
    assert found.findings[0].recoverable_s == pytest.approx(0.012)
    waits = [aligned(found).waits(k, found.measures[k].window) for k in range(RANKS)]
    assert [round(total(waited)) for waited in waits] == [12000, 12000, 0, 12000]
    assert {m.transfer_us for m in aligned(found).matched} == {500}
    assert found.findings[0].evidence[2] == (
        "rank 2 is the last in 4 of 4 matched collectives; in the worst, allreduce, the others "
        "wait 3.0 ms for a transfer of 0.5 ms"
    )


def test_clocks_are_aligned_at_the_ends_of_collectives(tmp_path: Path) -> None:
    clocks = (0, 250_000, -1_700, 40)
    found = diagnosed(tmp_path, *(rank_trace(k, clock_us=us) for k, us in enumerate(clocks)))
    assert aligned(found).offsets_us == pytest.approx(clocks)
    assert [m.skew_us for m in aligned(found).matched] == pytest.approx([0, 0, 0, 0])


def test_bandwidth_of_a_bus_needs_the_whole_group(tmp_path: Path) -> None:
    part = diagnosed(tmp_path, *one_late()[:2]).to_json()["collectives"]["by_name"][0]
    assert part["algorithm_gb_per_s"] is not None
    assert part["bus_gb_per_s"] is None


@pytest.mark.parametrize(("name", "factor"), [("all_gather_into_tensor", 0.75), ("broadcast", 1)])
def test_bus_bandwidth_depends_on_the_collective(tmp_path: Path, name: str, factor: float) -> None:
    found = diagnosed(tmp_path, *(rank_trace(k, name=name) for k in range(RANKS)))
    matched = aligned(found).matched[0]
    assert matched.algorithm_gb_per_s is not None
    assert matched.bus_gb_per_s == pytest.approx(factor * matched.algorithm_gb_per_s)


def test_time_that_all_ranks_transfer_is_communication_bound(tmp_path: Path) -> None:
    ranks = [rank_trace(k, late_us=2900 + 30 * k, transfer_us=4000) for k in range(RANKS)]
    found = diagnosed(tmp_path, *ranks)
    assert [f.kind for f in found.findings] == ["communication_bound"]
    assert found.findings[0].share == pytest.approx(0.4, abs=0.01)
    assert any("bus bandwidth" in sentence for sentence in found.findings[0].evidence)


def test_ranks_that_are_late_by_turns_have_no_straggler(tmp_path: Path) -> None:
    ranks = [rank_trace(k) for k in range(RANKS)]
    for step in range(4):
        late = ranks[step].events
        mine = [e for e in late if e["cat"] == "kernel" and int(e["ts"] // STEP_US) % 4 == step]
        gemm, collective = mine[0], mine[1]
        gemm["dur"] += LATEST_US
        collective["ts"] += LATEST_US
        collective["dur"] -= LATEST_US
    found = diagnosed(tmp_path, *ranks)
    assert found.verdict == "inconclusive"
    assert "for each other by turns" in found.summary


def test_missing_ranks_are_said_where_communication_is_blamed(tmp_path: Path) -> None:
    ranks = [rank_trace(k, late_us=2900, transfer_us=4000) for k in range(2)]
    found = diagnosed(tmp_path, *ranks)
    finding = found.findings[0]
    assert (finding.kind, finding.confidence) == ("communication_bound", "low")
    assert found.verdict == "inconclusive"
    assert finding.evidence[-1] == (
        "of 4 ranks only 2 are here: part of it may be waiting for one of the others"
    )


def test_only_steps_that_ranks_have_in_common_are_compared(tmp_path: Path) -> None:
    ranks = one_late()
    ranks[0] = rank_trace(0, first_step=5, clock_us=77)
    found = diagnosed(tmp_path, *ranks)
    assert {len(m.ranks) for m in aligned(found).matched} == {3, 4}
    assert [(f.kind, f.rank) for f in found.findings] == [("straggler", 2)]


def test_steps_with_different_numbers_of_collectives_are_left_out(tmp_path: Path) -> None:
    ranks = [rank_trace(k) for k in range(RANKS)]
    extra = next(e for e in ranks[1].events if e["name"].startswith("nccl"))
    ranks[1].events.append(extra | {"ts": extra["ts"] - 1500, "dur": 100})
    found = diagnosed(tmp_path, *ranks)
    assert aligned(found).unmatched == 2
    assert [len(m.ranks) for m in aligned(found).matched] == [3, 4, 4, 4]


def test_ranks_without_common_collectives_are_not_aligned(tmp_path: Path) -> None:
    other = rank_trace(1, name="broadcast")
    found = diagnosed(tmp_path, rank_trace(0), other)
    assert found.alignment is None
    assert found.to_json()["collectives"] is None
    assert align(found.measures[:1]) is None


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
    paths = written(tmp_path, *ranks)
    assert [f.kind for f in diagnose(paths).findings] == []
    (finding,) = diagnose(paths, nodes=NODES).findings
    assert (finding.kind, finding.rank, finding.node) == ("straggler", None, "gpu-2")
    assert finding.evidence[0].startswith("node gpu-2 keeps the others waiting")
    assert "that one of the 2 ranks of node gpu-2 enters last" in finding.evidence[0]


def rail(rank: int, transfer_us: float) -> TraceFile:
    """One of eight ranks; rank k and k + 4 share a rail, each a group of its own."""
    trace = rank_trace(rank, transfer_us=transfer_us)
    for event in trace.events:
        given = event.get("args", {})
        if "Group size" in given:
            given |= {"Group size": 2, "Process Group Name": f"rail{rank % 4}"}
    return trace


def test_a_slow_rail_is_named_by_its_ranks_and_nodes(tmp_path: Path) -> None:
    nodes = {rank: f"gpu-{1 + rank // 4}" for rank in range(8)}
    said = []
    for slow_us in (5000, 1500):
        ranks = [rail(rank, slow_us if rank % 4 == 3 else 1500) for rank in range(8)]
        findings = diagnosed(tmp_path, *ranks, nodes=nodes).findings
        said.append(" ".join(e for f in findings for e in f.evidence))
    assert (
        "the same transfer takes 1.8 times as long among rank 3 on gpu-1, rank 7 on gpu-2 as in "
        "the other groups (8.00 ms against 4.50 ms): look for a slow link between them"
    ) in said[0]
    assert "slow link" not in said[1]
