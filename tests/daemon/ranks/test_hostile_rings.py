"""Everything from a client is untrusted: nothing crashes, each is counted under a reason."""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.ranks.ring_files import RingFile
from tests.daemon.ranks.sources import ranks_source
from warpwatch import protocol
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.table import MAX_RINGS_PER_OWNER
from warpwatch_telemetry.records import Step

NAME = "train-r0-0123456789abcdef.ring"


class Node:
    """A rendezvous folder and what the daemon refused in it."""

    def __init__(self, path: Path) -> None:
        self.folder = RendezvousFolder(path / "run", path / "inbox", "0.0.0")
        self.rejects: Counter[str] = Counter()
        self.source = ranks_source(self.folder, lambda reason: self.rejects.update([reason]))

    def poll(self) -> None:
        self.source.poll(time.time(), time.monotonic())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.folder.close()


def test_files_that_are_no_rings_are_counted_by_reason(node: Node) -> None:
    ranks = node.folder.ranks
    good = RingFile(ranks)
    (ranks / NAME.replace("r0", "r1")).write_bytes(b"short")
    (ranks / NAME.replace("r0", "r2")).write_bytes(random.Random(1).randbytes(protocol.RING_SIZE))
    (ranks / NAME.replace("r0", "r3")).write_bytes(good.path.read_bytes()[:-256])
    (ranks / NAME.replace("r0", "r4")).write_bytes(bytes(2 << 20))
    (ranks / NAME.replace("r0", "r5")).symlink_to(good.path)
    os.mkfifo(ranks / NAME.replace("r0", "r6"))
    (ranks / NAME.replace("r0", "r7")).mkdir()
    (ranks / "odd name.ring").write_bytes(good.path.read_bytes())
    node.poll()
    assert dict(node.rejects) == {
        "wrong_size": 3,
        "bad_magic": 1,
        "symlink": 1,
        "not_regular": 2,
        "bad_name": 1,
    }
    node.poll()
    assert node.rejects.total() == 8, "each is counted once"
    assert len(node.source.states(time.monotonic())) == 1


def test_an_unfinished_ring_is_waited_for_then_refused(node: Node) -> None:
    path = node.folder.ranks / "train-r0-0123456789abcdef.new"
    path.write_bytes(b"")
    node.poll()
    assert node.rejects == {}
    old = time.time() - 120
    os.utime(path, (old, old))
    (node.folder.ranks / "wake").touch()
    node.poll()
    assert node.rejects["unfinished"] == 1


@pytest.mark.parametrize(
    "metadata",
    [
        {"rank": -1},
        {"rank": 1 << 40},
        {"rank": True},
        {"world_size": "many"},
        {"job": ["a"]},
        {"phases": ["x"] * 17},
        {"phases": {}},
        {"flops_per_token": float("nan")},
        {"phases": ["not a word\n"]},
    ],
)
def test_claims_that_make_no_sense_are_refused(node: Node, metadata: dict[str, object]) -> None:
    ring = RingFile(node.folder.ranks)
    said = {"job": "j", "rank": 0, "world_size": 1, "phases": [], **metadata}
    data = protocol.encode_metadata(2, said)
    ring.put(protocol.META_OFFSETS[1], data)
    node.poll()
    assert dict(node.rejects) == {"bad_metadata": 1}


def test_a_hostile_name_is_one_short_line(node: Node) -> None:
    RingFile(node.folder.ranks)
    ring = RingFile(node.folder.ranks, rank=1)
    said = {"job": "a\n\x1b[31m<script>" + "x" * 500, "rank": 1, "world_size": 2}
    ring.put(protocol.META_OFFSETS[1], protocol.encode_metadata(2, said))
    node.poll()
    job = max((state.job for state in node.source.states(time.monotonic())), key=len)
    assert len(job) == 128
    assert "\n" not in job
    assert "\x1b" not in job


def test_a_broken_record_is_lost_not_fatal(node: Node) -> None:
    ring = RingFile(node.folder.ranks)
    with ring.held():
        for _ in range(3):
            ring.step()
        ring.put(protocol.record_offset(2) + 30, b"\xff\xff")
        node.poll()
        (state,) = node.source.states(time.monotonic())
        assert state.lost_records == 1
        assert sum(state.durations.counts) == 2


def test_an_event_that_is_no_json_is_counted_and_costs_nothing_else(node: Node) -> None:
    ring = RingFile(node.folder.ranks)
    with ring.held():
        ring.record(protocol.RECORD_EVENT, b'{"event": "exce')
        ring.event("died")
        ring.step()
        node.poll()
        assert dict(node.rejects) == {"bad_event": 2}
        (state,) = node.source.states(time.monotonic())
        assert (state.steps_total, state.status) == (1, "running")


def test_numbers_that_no_record_can_hold_are_not_known(node: Node) -> None:
    ring = RingFile(node.folder.ranks)
    huge = 1 << 63
    with ring.held():
        step = protocol.STEP.pack(7, 10**8, huge, huge, huge, huge)
        ring.record(protocol.RECORD_STEP, step)
        ring.record(protocol.RECORD_MEMORY, protocol.MEMORY.pack(*[huge] * 6))
        ring.record(protocol.RECORD_GC, protocol.GC.pack(huge, huge, 0))
        records = node.source.poll(time.time(), time.monotonic())
        (state,) = node.source.states(time.monotonic())
    (taken,) = (record for record in records if isinstance(record, Step))
    assert (taken.step, taken.gpu_s, taken.samples, taken.tokens) == (7, None, 0, 0)
    assert taken.memory_allocated_bytes is None
    assert (state.memory_reserved_bytes, state.gc_s, state.allocation_retries_total) == (None,) * 3


def test_a_step_of_a_number_that_no_record_can_hold_ends_the_ring(node: Node) -> None:
    ring = RingFile(node.folder.ranks)
    step = protocol.STEP.pack(1 << 63, 10**8, *[protocol.ABSENT] * 4)
    with ring.held():
        ring.record(protocol.RECORD_STEP, step)
        node.poll()
    assert dict(node.rejects) == {"bad_record": 1}


def test_a_ring_beyond_the_limit_is_accepted_once_another_has_gone(node: Node) -> None:
    rings = [
        RingFile(node.folder.ranks, rank=rank, world_size=100)
        for rank in range(MAX_RINGS_PER_OWNER + 1)
    ]
    node.poll()
    assert dict(node.rejects) == {"too_many_of_owner": 1}
    accepted = {state.rank for state in node.source.states(time.monotonic())}
    (waiting,) = set(range(MAX_RINGS_PER_OWNER + 1)) - accepted
    with rings[waiting].held():
        # The others have ended: ten minutes later their rings go.
        node.source.poll(time.time(), time.monotonic() + 601)
        node.poll()
        assert [state.rank for state in node.source.states(time.monotonic())] == [waiting]


def test_a_ring_that_shrinks_while_it_is_read_is_refused(node: Node) -> None:
    ring = RingFile(node.folder.ranks)
    with ring.held():
        ring.step()
        node.poll()
        os.truncate(ring.path, 5000)
        node.poll()
        assert dict(node.rejects) == {"wrong_size": 1}
        assert node.source.states(time.monotonic()) == ()


def test_a_record_count_that_goes_back_is_refused(node: Node) -> None:
    ring = RingFile(node.folder.ranks)
    with ring.held():
        ring.step()
        node.poll()
        ring.word(protocol.WORD_RECORDS, 0)
        node.poll()
        assert dict(node.rejects) == {"bad_header": 1}


def test_an_absurd_record_count_costs_only_the_records(node: Node) -> None:
    ring = RingFile(node.folder.ranks)
    with ring.held():
        ring.step()
        ring.word(protocol.WORD_RECORDS, (1 << 64) - 1)
        began = time.monotonic()
        node.poll()
        assert time.monotonic() - began < 2
        (state,) = node.source.states(time.monotonic())
        assert state.lost_records > 1 << 60


def test_an_owner_has_a_limited_number_of_rings(node: Node) -> None:
    for rank in range(MAX_RINGS_PER_OWNER + 3):
        RingFile(node.folder.ranks, rank=rank, world_size=100)
    node.poll()
    assert dict(node.rejects) == {"too_many_of_owner": 3}
    assert len(node.source.states(time.monotonic())) == MAX_RINGS_PER_OWNER


def test_ten_thousand_files_do_not_hold_up_the_good_one(node: Node) -> None:
    for number in range(10_000):
        (node.folder.ranks / f"junk-r0-{number:016x}.ring").write_bytes(b"")
    good = RingFile(node.folder.ranks)
    with good.held():
        good.step()
        node.poll()
        assert node.rejects["wrong_size"] == 10_000
        (state,) = node.source.states(time.monotonic())
        assert state.steps_total == 1
        old = time.time() - 10
        os.utime(node.folder.ranks, (old, old))
        node.poll()
        began = time.thread_time()
        node.poll()
        assert time.thread_time() - began < 0.05, "an unchanged folder is not scanned again"


def test_a_file_that_grows_and_shrinks_during_reading_never_crashes(node: Node) -> None:
    ring = RingFile(node.folder.ranks)
    stop = threading.Event()

    def tug() -> None:
        while not stop.is_set():
            for size in (0, 100, 4096, 9999, protocol.RING_SIZE, protocol.RING_SIZE * 2):
                os.truncate(ring.path, size)

    thread = threading.Thread(target=tug)
    thread.start()
    try:
        for _ in range(200):
            (node.folder.ranks / "wake").touch()
            node.poll()
    finally:
        stop.set()
        thread.join()
    assert node.rejects.total() > 0
