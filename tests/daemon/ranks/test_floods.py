"""What a job floods the daemon with: records faster than they are read, and names of phases."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.daemon.ranks.ring_files import whole_ring
from tests.daemon.ranks.sources import RankNode
from warpwatch import protocol
from warpwatch_daemon.ranks.record_budget import fair_shares
from warpwatch_daemon.ranks.saved import FILE, Positions
from warpwatch_telemetry.records import Step

RANKS = 8
RESTARTS = 12
SIZE = protocol.RECORD_COUNT


@pytest.mark.parametrize(("kind", "count"), [("records", 8), ("counts", 60)])
def test_of_a_flood_a_bounded_number_of_records_is_read_and_every_one_of_an_honest_rank(
    node, caplog, kind, count
):
    honest = node.ring(job="honest")
    rings = [node.ring(job="flood", rank=rank, world_size=count) for rank in range(count)]
    node.poll()
    read: Counter[str] = Counter()
    for turn in range(25):
        honest.step()
        for ring in rings:
            if kind == "records":
                ring.put(protocol.HEADER_SIZE, whole_ring(turn))
            ring.word(protocol.WORD_RECORDS, (turn + 1) * SIZE)
        node.clock.advance(0.2)
        read.update(record.job for record in node.poll() if isinstance(record, Step))
    # 12,000 at once and 4,000 a second, of the many that were written.
    assert read["flood"] <= 12_000 + 4_000 * 5
    assert read["honest"] == 25
    assert (read["flood"] > 0) is (kind == "records")
    assert node.rejects.keys() == {"too_many_records"}
    assert node.rejects["too_many_records"] >= count
    # The log names each ring once.
    assert caplog.text.count("more records than are read") == count
    states = {state.job: state for state in node.states()}
    assert (states["honest"].lost_records, states["honest"].steps_total) == (0, 25)
    assert states["flood"].lost_records > 0


def test_who_asks_for_little_gets_it_and_the_others_share_what_is_left():
    assert fair_shares({"flood": 2048, "honest": 3, "other": 400}, 300) == {
        "honest": 3,
        "other": 148,
        "flood": 149,
    }
    assert fair_shares({"flood": 2048, "honest": 3}, 0) == {"honest": 0, "flood": 0}
    assert fair_shares({"a": 1, "b": 2}, 1000) == {"a": 1, "b": 2}


def restart(node: RankNode, turn: int, same_names: bool) -> list[Step]:
    """A step of every rank, of a process that is gone at once: 0.01 s in each of its 16 phases."""
    for rank in range(RANKS):
        of = "all" if same_names else rank
        names = [f"p{of}_{turn}_{n}" for n in range(protocol.MAX_PHASES)]
        ring = node.file(rank=rank, world_size=RANKS, phases=names)
        ring.phases_ns = [10**7] * protocol.MAX_PHASES
        payload = protocol.STEP.pack(0, 10**9, protocol.ABSENT, protocol.ABSENT, 8, 0)
        payload += (10**7).to_bytes(8, "little") * protocol.MAX_PHASES
        ring.record(protocol.RECORD_STEP, payload)
        totals = protocol.encode_totals(1, 1, 1, 8, 0, 10**9, ring.phases_ns)
        ring.put(protocol.TOTALS_OFFSETS[1], totals)
    node.clock.advance(1.0)
    return [record for record in node.poll() if isinstance(record, Step)]


def phases_s(node: RankNode) -> dict[int, dict[str, float]]:
    return {state.rank: dict(state.phases_s) for state in node.states()}


def test_ranks_that_restart_with_new_phases_have_16_each_and_64_a_job(node):
    for turn in range(RESTARTS):
        restart(node, turn, same_names=False)
    found = phases_s(node)
    # The first four ranks have taken the job's 64, the others have one name for all of theirs.
    assert [len(found[rank]) for rank in range(RANKS)] == [17] * 4 + [1] * 4
    assert (node.folder.path.parent / FILE).stat().st_size < 10_000
    for rank in range(RANKS):
        assert sum(found[rank].values()) == pytest.approx(RESTARTS * 16 * 0.01)


def test_steps_say_other_for_the_phases_beyond_the_limit_also_after_a_restart(node):
    known = restart(node, 0, same_names=True)
    assert [step.phases_s for step in known] == [{f"pall_0_{n}": 0.01 for n in range(16)}] * RANKS
    beyond = restart(node, 1, same_names=True)
    assert [step.phases_s for step in beyond] == [{"other": pytest.approx(0.16)}] * RANKS
    before = phases_s(node)
    node.clock.advance(1.0)
    node.restart()
    assert phases_s(node) == before
    assert set(before[0]) == {*(f"pall_0_{n}" for n in range(16)), "other"}


def test_positions_are_written_only_when_they_have_changed(tmp_path):
    wakes: list[None] = []
    positions = Positions(tmp_path, wake=lambda: wakes.append(None))
    entry = {"pod": None, "ring": "a", "left": True}
    assert positions.put((), [entry]) == 1
    positions.write()
    written = (tmp_path / FILE).stat()
    assert positions.put((), [entry]) == 1
    positions.write()
    assert (tmp_path / FILE).stat().st_ino == written.st_ino
    assert len(wakes) == 1
    assert positions.put((), []) == 2
    positions.write()
    assert positions.written == 2
