"""Everything from a client is untrusted: nothing crashes, all is bounded and counted."""

import os
import random
import stat
from collections import Counter
from unittest.mock import Mock

import pytest

from tests.cases import cases
from tests.daemon.ranks.ring_files import whole_ring
from tests.daemon.ranks.sources import RankNode
from warpwatch import protocol
from warpwatch_daemon.ranks.counts import FILE, Positions, SavedRank
from warpwatch_daemon.ranks.table import RingTable
from warpwatch_telemetry.records import End, Step

NAME = "train-r0-0123456789abcdef.ring"


def test_files_that_are_no_rings_are_counted_by_reason(node):
    ranks, good = node.folder.ranks, node.file()
    (ranks / NAME.replace("r0", "r1")).write_bytes(b"short")
    (ranks / NAME.replace("r0", "r2")).write_bytes(random.Random(1).randbytes(protocol.RING_SIZE))
    (ranks / NAME.replace("r0", "r3")).write_bytes(good.path.read_bytes()[:-256])
    (ranks / NAME.replace("r0", "r4")).write_bytes(bytes(2 << 20))
    (ranks / NAME.replace("r0", "r5")).symlink_to(good.path)
    os.mkfifo(ranks / NAME.replace("r0", "r6"))
    (ranks / NAME.replace("r0", "r7")).mkdir()
    (ranks / "odd name.ring").write_bytes(good.path.read_bytes())
    reasons = {"wrong_size": 3, "bad_magic": 1, "symlink": 1, "not_regular": 2, "bad_name": 1}
    if os.getuid() == 0:
        # The tape drive, of which there is none: opening it would be an error of another name.
        os.mknod(ranks / NAME.replace("r0", "r8"), 0o600 | stat.S_IFCHR, os.makedev(9, 0))
        reasons["not_regular"] = 3
    node.poll()
    assert node.rejects == reasons
    node.poll()
    assert node.rejects == reasons, "each is counted once"
    assert len(node.states()) == 1
    # One that is written over is considered again: it continues the good one.
    (ranks / NAME.replace("r0", "r1")).write_bytes(good.path.read_bytes())
    node.poll(1.0, 3.0)
    assert not good.path.exists()


def test_an_unfinished_ring_is_waited_for_a_minute_then_refused(node):
    (unfinished := node.folder.ranks / "train-r0-0123456789abcdef.new").touch()
    node.poll(59)
    assert node.rejects == {}
    node.poll(61.5)
    assert node.rejects == {"unfinished": 1}
    assert node.source._shared.table._refused.keys() == {unfinished.name}
    unfinished.unlink()
    node.poll(63)
    assert node.source._shared.table._refused == {}


@pytest.mark.parametrize("metadata", cases(__file__)["refused"])
def test_claims_that_make_no_sense_are_refused(node, metadata):
    said = {"job": "j", "rank": 0, "world_size": 1, "phases": [], **metadata}
    node.file().put(protocol.META_OFFSETS[1], protocol.encode_metadata(2, said))
    node.poll()
    assert node.rejects == {"bad_metadata": 1}
    assert node.states() == []


def test_a_hostile_name_is_one_short_line(node):
    ring = node.file()
    said = {"job": "a\n\x1b[31m<script>" + "x" * 500, "rank": 0, "world_size": 2}
    ring.put(protocol.META_OFFSETS[1], protocol.encode_metadata(2, said))
    job = node.newest().job
    assert len(job) == 128
    assert job.isprintable()


@pytest.mark.parametrize("by", [None, 1, 3])
def test_a_broken_record_is_lost_not_fatal(node, by):
    """Or one that another record has written over: the next round may be written meanwhile."""
    ring = node.ring()
    ring.steps_of(3)
    if by is None:
        ring.put(protocol.record_offset(2) + 30, b"\xff\xff")
    else:
        other = ring.path.read_bytes()[protocol.record_offset(by) :][: protocol.RECORD_SIZE]
        ring.put(protocol.record_offset(2), other)
    state = node.newest()
    assert (state.lost_records, sum(state.durations.counts)) == (1, 2)


def test_an_event_that_is_no_json_is_counted_and_costs_nothing_else(node):
    ring = node.ring()
    ring.record(protocol.RECORD_EVENT, b'{"event": "exce')
    # Only the daemon or the kernel may report these of a process.
    ring.event("died")
    ring.record(protocol.RECORD_EVENT, b'{"event":"process","cpu_s":1}')
    ring.event("records_lost", steps=1000)
    ring.step()
    assert node.events() == []
    assert node.rejects == {"bad_event": 4}
    state = node.newest()
    assert (state.steps_total, state.status) == (1, "running")


def test_numbers_that_no_record_can_hold_are_not_known(node):
    ring, huge = node.ring(), 1 << 63
    for number, values in ((7, [huge] * 4), (8, [10**7, 5, 6, 4])):
        ring.record(protocol.RECORD_STEP, protocol.STEP.pack(number, 10**8, *values))
    ring.record(protocol.RECORD_MEMORY, protocol.MEMORY.pack(*[huge] * 6))
    ring.record(protocol.RECORD_GC, protocol.GC.pack(huge, huge, 0))
    found = [record for record in node.poll() if isinstance(record, Step)]
    assert [(one.gpu_s, one.memory_allocated_bytes, one.samples, one.tokens) for one in found] == [
        (None, None, 0, 0), (0.01, 5, 6, 4),
    ]  # fmt: skip
    (state,) = node.states()
    assert (state.memory_reserved_bytes, state.gc_s, state.allocation_retries_total) == (None,) * 3


TOO_LATE_A_STEP = protocol.STEP.pack(1 << 63, 10**8, *[protocol.ABSENT] * 4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda ring: ring.record(protocol.RECORD_STEP, TOO_LATE_A_STEP), "bad_record"),
        (lambda ring: os.truncate(ring.path, 5000), "wrong_size"),
        (lambda ring: ring.word(protocol.WORD_RECORDS, 0), "bad_header"),
    ],
)
def test_a_ring_that_turns_out_to_be_broken_ends(node, change, reason):
    ring = node.met(steps=1)
    change(ring)
    assert [one.rank for one in node.poll() if isinstance(one, End)] == [0]
    assert node.rejects == {reason: 1}
    assert (node.states(), os.listdir(node.folder.commands)) == ([], [])
    assert ring.path.exists()


def test_an_absurd_record_count_costs_only_the_records(node):
    ring, other = node.ring(job="absurd"), node.met(job="other")
    ring.step()
    ring.word(protocol.WORD_RECORDS, (1 << 64) - 1)
    node.poll()
    other.steps_of(100)
    node.poll()
    state, well = node.states()
    assert state.lost_records > 1 << 60
    assert sum(state.durations.counts) <= protocol.RECORD_COUNT
    assert (well.lost_records, sum(well.durations.counts)) == (0, 100)


def test_an_owner_has_64_rings_and_one_beyond_them_is_accepted_once_another_has_gone(node):
    number = 65
    rings = [node.file(rank=rank, world_size=100) for rank in range(number)]
    node.poll()
    assert node.rejects == {"too_many_of_owner": 1}
    (waiting,) = set(range(number)) - {state.rank for state in node.states()}
    node.hold(rings[waiting])
    # The others have ended: ten minutes later their rings go.
    node.poll(601, 0)
    assert [state.rank for state in node.states()] == [waiting]


def test_a_thousand_files_do_not_hold_up_the_good_one_and_are_looked_at_once(node, monkeypatch):
    for number in range(1_000):
        (node.folder.ranks / f"junk-r0-{number:016x}.ring").touch()
    node.met(steps=1)
    assert node.rejects == {"wrong_size": 1_000}
    assert [state.steps_total for state in node.states()] == [1]
    # Some seconds after its last change the folder is scanned for a last time.
    node.poll(100)
    take_new = Mock(return_value=[])
    monkeypatch.setattr(RingTable, "_take_new", take_new)
    node.poll(102)
    assert take_new.call_count == 0
    (node.folder.ranks / "another").touch()
    node.poll(104)
    assert take_new.call_count == 1


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
    # 12,000 at once and 4,000 per second, of the many that were written; without a record none.
    assert read["flood"] == (12_000 + 24 * 800 - 25 if kind == "records" else 0)
    assert read["honest"] == 25
    assert node.rejects.keys() == {"too_many_records"}
    assert node.rejects["too_many_records"] >= count
    # The log names each ring once.
    assert caplog.text.count("more records than are read") == count
    # A new ring has its first records, if there is time for no other.
    node.met(job="late", steps=16)
    states = {state.job: state for state in node.states()}
    assert states["late"].lost_records == 0
    assert (states["honest"].lost_records, states["honest"].steps_total) == (0, 25)
    assert states["flood"].lost_records > 0


def restart(node: RankNode, turn: int, same_names: bool) -> list[Step]:
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


def test_positions_are_written_only_when_they_have_changed(tmp_path, caplog, monkeypatch):
    failed: list[None] = []
    nowhere = Positions(tmp_path / "none", lambda: failed.append(None))
    nowhere.put([])
    nowhere.write()
    nowhere.write()
    assert (len(caplog.messages), len(failed)) == (1, 2)
    wakes: list[None] = []
    positions = Positions(tmp_path, wake=lambda: wakes.append(None))
    entry = SavedRank(pod=None, ring="a", left=True)
    assert positions.put([entry]) == 1
    positions.write()
    written = (tmp_path / FILE).stat()
    assert positions.put([entry]) == 1
    positions.write()
    assert (tmp_path / FILE).stat().st_ino == written.st_ino
    assert len(wakes) == 1
    assert positions.put([]) == 2
    positions.write()
    assert positions.written == 2
    # Records that come while it writes are not lost.
    write = positions._file.write
    monkeypatch.setattr(positions._file, "write", lambda body: (write(body), positions.put([])))
    assert positions.put([entry]) == 3
    positions.write()
    assert (positions.written, len(positions.load())) == (3, 1)
    positions.write()
    assert (positions.written, len(positions.load())) == (4, 0)


def test_a_saved_rank_that_cannot_be_read_costs_no_other(tmp_path, caplog):
    positions = Positions(tmp_path)
    entries = [SavedRank(pod=None, ring=name, position=7) for name in "abc"]
    positions.put(entries)
    positions.write()
    body = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(body.replace(b'"b"', b"[]"))
    assert list(positions.load().values()) == [entries[0], entries[2]]
    assert "a rank is ignored: Expected `str`, got `array`" in caplog.text
    (tmp_path / FILE).write_bytes(body.replace(b'"version":1', b'"version":2'))
    assert positions.load() == {}
