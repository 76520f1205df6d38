"""Iterations of a server: what they last, what is idle, and its counts per second."""

import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cases import cases
from tests.client.daemon_side import program, written
from tests.manual_clock import ManualClock
from tests.waiting import eventually
from warpwatch import iterations, protocol
from warpwatch.iterations import IterationClock, ServeCounts
from warpwatch.monitor import Monitor
from warpwatch.protocol import MAX_BUCKETS
from warpwatch.ring import DURATION, FIRST_PHASE, RingWriter

CASES = cases(__file__)
MS = 1_000_000
S = 1_000_000_000


@pytest.fixture
def server(clock: ManualClock, monkeypatch: pytest.MonkeyPatch, ring: RingWriter) -> Monitor:
    def now() -> int:
        return round(clock.monotonic() * 1e9)

    monkeypatch.setattr(iterations, "monotonic_ns", now)
    monitor = Monitor(IterationClock())
    monitor.clock.ring = ring
    return monitor


def iterate(server: Any, clock: ManualClock, lasts_s: float, *work: int, **said: bool) -> None:
    with server.iteration(*work, **said):
        clock.advance(lasts_s)


def of(ring: RingWriter, kind: int) -> Iterator[tuple[int, ...]]:
    for record in written(ring):
        if record.type == kind:
            payload = record.payload
            yield struct.unpack(f"<{len(payload) // 8}Q", payload[: len(payload) // 8 * 8])


def durations_ms(server: Monitor, ring: RingWriter) -> list[int]:
    server.clock.settle()
    return [round(words[DURATION] / MS) for words in of(ring, protocol.RECORD_ITERATION)]


def test_idle_belongs_to_no_iteration_and_waiting_to_the_next(server, clock, ring):
    iterate(server, clock, 0.04, 512)
    clock.advance(0.01)
    # Its requests were in flight: the gap is waiting.
    iterate(server, clock, 0.02, 0, 4, 900)
    clock.advance(0.5)
    iterate(server, clock, 0.03, 256)
    clock.advance(0.5)
    # A server that knows better says so.
    iterate(server, clock, 0.03, 0, 3, after_idle=True)
    clock.advance(0.02)
    iterate(server, clock, 0.03, 8, after_idle=False)
    assert durations_ms(server, ring) == [40, 30, 30, 30, 50]
    totals = server.clock.totals
    assert server.clock.phase_names == ["wait"]
    assert round(totals[FIRST_PHASE] / MS) == 30
    # All tokens, and the work.
    work = [words[5:9] for words in of(ring, protocol.RECORD_ITERATION)]
    expected = [(512, 512, 0, 0), (4, 0, 4, 900), (256, 256, 0, 0), (3, 0, 3, 0), (8, 8, 0, 0)]
    assert work == expected


def test_a_gap_that_was_counted_as_idle_belongs_to_no_iteration(server, clock, ring):
    iterate(server, clock, 0.04, 512)
    clock.advance(3.0)
    iterate(server, clock, 0.02, 0, 4)
    # A failed one rests, too; its own time does not count as an iteration.
    with pytest.raises(ValueError, match="bad request"), server.iteration(8):
        raise ValueError("bad request")
    clock.advance(60.0)
    iterate(server, clock, 0.03, 512)
    assert durations_ms(server, ring) == [40, 20, 30]


def test_seconds_have_what_counts_rose_by(server, clock, ring):
    counts = server.serving
    clock.advance(0.5)
    iterate(server, clock, 0.25, 512)
    counts.prompt_tokens += 512.0
    nothing: list[Any] = [None, float("nan"), float("inf"), "0.1"]
    counts.observe("first_token", [0.0012, *nothing, -0.1, 0.0012, 500.0])
    counts.observe("first_token", 0.2)
    counts.observe("last_token", [0.2])
    clock.advance(0.25)
    counts.write(ring, round(clock.monotonic() * 1e9))
    counts.write(ring, round(clock.monotonic() * 1e9))
    clock.advance(2.0)
    counts.sample = lambda: (3.0, 1, 1.5)
    counts.observe("first_token", [0.0012])
    counts.write(ring, round(clock.monotonic() * 1e9))
    counts.generated_tokens = 7
    counts.sample = lambda: 1 // 0
    counts.write(ring, round(clock.monotonic() * 1e9) + 1, force=True)
    first, second, third = [
        [round(word / MS) if place < 2 else word for place, word in enumerate(words)]
        for words in of(ring, protocol.RECORD_SERVE)
    ]
    absent = protocol.ABSENT
    # The last quarter of a second may be waiting yet.
    assert first[:10] == [1000, 500, absent, absent, absent, 0, 0, 0, 512, 0]
    assert round(first[10] / S, 3) == 500.002
    assert second[:10] == [2000, 2000, 3, 1, 1_000_000_000, 0, 0, 0, 0, 0]
    assert third[2:10] == [3, 1, 1_000_000_000, 0, 0, 0, 0, 7]
    payloads = (r.payload[104:] for r in written(ring) if r.type == protocol.RECORD_SERVE)
    buckets = [*protocol.BUCKET.iter_unpack(b"".join(payloads))]
    assert buckets == [(0, 0, 1), (0, 2, 2), (0, 67, 1), (0, 2, 1)]


@pytest.mark.parametrize(("buckets", "flags"), [(45, [2, 2, 0]), (2 * MAX_BUCKETS, [2, 0])])
def test_buckets_that_do_not_fit_are_in_records_before(ring, buckets, flags):
    counts = ServeCounts(0)
    counts.observe("inter_token", [0.00099 * 1.1**n for n in range(buckets)])
    counts.write(ring, S)
    records = written(ring)
    assert [record.flags for record in records] == flags
    entries = [protocol.BUCKET.iter_unpack(record.payload[104:]) for record in records]
    assert sum(number for part in entries for _, _, number in part) == buckets


def test_a_servers_process_is_seen_before_its_first_iteration_and_ends_cleanly(folder):
    with program(folder, CASES["serves"]) as process:
        eventually(lambda: folder.rings())
        said = folder.ring().metadata
        assert (said["kind"], said["role"], said["rank"]) == ("serve", "frontend", 1)
        process.stdin.write("\n")
        process.stdin.flush()
        process.wait()
    ring = folder.ring()
    kinds = [record.type for record in ring.records]
    assert kinds.count(protocol.RECORD_ITERATION) == 1
    assert protocol.RECORD_SERVE in kinds
    assert (ring.header.ended, ring.event_names()) == (True, ["exit"])


@pytest.mark.parametrize("parent", [[], ["attached"]])
@pytest.mark.parametrize(("how", "events"), [("error", ["exception", "exit"]), ("exit", ["exit"])])
def test_an_exception_that_ends_a_child_of_multiprocessing_is_reported(folder, how, events, parent):
    with program(folder, CASES["engine"], how, *parent) as process:
        process.wait()
    assert folder.ring().event_names() == events
