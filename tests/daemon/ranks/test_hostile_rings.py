"""Everything from a client is untrusted: nothing crashes, each is counted under a reason."""

from __future__ import annotations

import os
import random
import stat
import threading
from unittest.mock import Mock

import pytest

from tests.daemon.ranks.sources import RankNode
from warpwatch import protocol
from warpwatch_daemon.ranks.table import MAX_RINGS_PER_OWNER, RingTable
from warpwatch_telemetry.records import Step

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


def test_an_unfinished_ring_is_waited_for_a_minute_then_refused(node):
    (node.folder.ranks / "train-r0-0123456789abcdef.new").touch()
    node.poll(50)
    assert node.rejects == {}
    node.poll(120)
    assert node.rejects == {"unfinished": 1}


@pytest.mark.parametrize(
    "metadata",
    [
        {"rank": -1},
        {"rank": 1 << 40},
        {"rank": True},
        {"rank": 777, "world_size": 8},
        {"world_size": "many"},
        {"job": ["a"]},
        {"phases": ["x"] * 17},
        {"phases": {}},
        {"phases": ["not a word\n"]},
        {"flops_per_token": float("nan")},
        {"flops_per_sample": -1},
        {"parallel": {"tensor": [2, 2]}},
    ],
)
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


def test_a_broken_record_is_lost_not_fatal(node):
    ring = node.ring()
    ring.steps_of(3)
    ring.put(protocol.record_offset(2) + 30, b"\xff\xff")
    state = node.newest()
    assert (state.lost_records, sum(state.durations.counts)) == (1, 2)


def test_an_event_that_is_no_json_is_counted_and_costs_nothing_else(node):
    ring = node.ring()
    ring.record(protocol.RECORD_EVENT, b'{"event": "exce')
    # What the daemon alone may say of a process, or the kernel.
    ring.event("died")
    ring.record(protocol.RECORD_EVENT, b'{"event":"process","cpu_s":1}')
    ring.step()
    assert node.events() == []
    assert node.rejects == {"bad_event": 3}
    state = node.newest()
    assert (state.steps_total, state.status) == (1, "running")


def test_numbers_that_no_record_can_hold_are_not_known(node):
    ring, huge = node.ring(), 1 << 63
    ring.record(protocol.RECORD_STEP, protocol.STEP.pack(7, 10**8, huge, huge, huge, huge))
    ring.record(protocol.RECORD_MEMORY, protocol.MEMORY.pack(*[huge] * 6))
    ring.record(protocol.RECORD_GC, protocol.GC.pack(huge, huge, 0))
    (taken,) = (record for record in node.poll() if isinstance(record, Step))
    assert (taken.step, taken.gpu_s, taken.samples, taken.tokens) == (7, None, 0, 0)
    assert taken.memory_allocated_bytes is None
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
    ring = node.ring()
    ring.step()
    node.poll()
    change(ring)
    node.poll()
    assert node.rejects == {reason: 1}
    assert node.states() == []


def test_an_absurd_record_count_costs_only_the_records(node):
    ring = node.ring()
    ring.step()
    ring.word(protocol.WORD_RECORDS, (1 << 64) - 1)
    state = node.newest()
    assert state.lost_records > 1 << 60
    assert sum(state.durations.counts) <= protocol.RECORD_COUNT


def test_an_owner_has_64_rings_and_one_beyond_them_is_accepted_once_another_has_gone(node):
    number = MAX_RINGS_PER_OWNER + 1
    rings = [node.file(rank=rank, world_size=100) for rank in range(number)]
    node.poll()
    assert node.rejects == {"too_many_of_owner": 1}
    (waiting,) = set(range(number)) - {state.rank for state in node.states()}
    node.hold(rings[waiting])
    # The others have ended: ten minutes later their rings go.
    node.poll(601)
    node.poll()
    assert [state.rank for state in node.states()] == [waiting]


def test_a_thousand_files_do_not_hold_up_the_good_one_and_are_looked_at_once(node, monkeypatch):
    for number in range(1_000):
        (node.folder.ranks / f"junk-r0-{number:016x}.ring").touch()
    node.ring().step()
    node.poll()
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


def test_a_file_that_grows_and_shrinks_during_reading_never_crashes(node: RankNode) -> None:
    ring, stop = node.file(), threading.Event()

    def tug() -> None:
        while not stop.is_set():
            for size in (0, 100, 4096, 9999, protocol.RING_SIZE, protocol.RING_SIZE * 2):
                os.truncate(ring.path, size)

    thread = threading.Thread(target=tug)
    thread.start()
    try:
        for _ in range(50):
            (node.folder.ranks / "wake").touch()
            node.poll()
    finally:
        stop.set()
        thread.join()
    assert node.rejects.total() > 0
