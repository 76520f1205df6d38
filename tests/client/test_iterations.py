"""Iterations of a server: what they last, what is idle, and its counts per second."""

import struct
from collections.abc import Iterator
from typing import Any

import pytest

from tests.client.daemon_side import program, written
from tests.manual_clock import ManualClock
from tests.waiting import eventually
from warpwatch import iterations, protocol
from warpwatch.identity import describe
from warpwatch.iterations import IterationClock, ServeCounts
from warpwatch.monitor import Monitor
from warpwatch.ring import DURATION, FIRST_PHASE, RingWriter

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
    assert durations_ms(server, ring) == [40, 30, 30, 30]
    totals = server.clock.totals
    assert server.clock.phase_names == ["wait"]
    assert round(totals[FIRST_PHASE] / MS) == 10
    work = [words[6:9] for words in of(ring, protocol.RECORD_ITERATION)]
    assert work == [(512, 0, 0), (0, 4, 900), (256, 0, 0), (0, 3, 0)]


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
    counts.observe("first_token", [0.0012, *nothing, 0.0012, 500.0])
    counts.observe("first_token", 0.2)
    counts.observe("last_token", [0.2])
    clock.advance(0.25)
    counts.write(ring, round(clock.monotonic() * 1e9))
    counts.write(ring, round(clock.monotonic() * 1e9))
    clock.advance(2.0)
    counts.running, counts.waiting, counts.kv_usage = 3.0, 1, 0.5
    counts.write(ring, round(clock.monotonic() * 1e9))
    first, second = [
        [round(word / MS) if place < 2 else word for place, word in enumerate(words)]
        for words in of(ring, protocol.RECORD_SERVE)
    ]
    absent = protocol.ABSENT
    # The last quarter of a second may be waiting yet.
    assert first[:10] == [1000, 500, absent, absent, absent, 0, 0, 0, 512, 0]
    assert round(first[10] / S, 3) == 500.002
    assert second[:10] == [2000, 2000, 3, 1, 500_000_000, 0, 0, 0, 0, 0]
    payload = next(r.payload for r in written(ring) if r.type == protocol.RECORD_SERVE)
    assert [*protocol.BUCKET.iter_unpack(payload[104:])] == [(0, 2, 2), (0, 67, 1)]


def test_buckets_that_do_not_fit_are_in_records_before(ring):
    counts = ServeCounts(0)
    counts.observe("inter_token", [0.00099 * 1.1**n for n in range(45)])
    counts.write(ring, S)
    records = written(ring)
    assert [record.flags for record in records] == [2, 2, 0]
    entries = [protocol.BUCKET.iter_unpack(record.payload[104:]) for record in records]
    assert sum(number for part in entries for _, _, number in part) == 45


def test_a_server_that_reports_idle_itself_is_idle_from_then_on(ring):
    counts = ServeCounts(0)
    counts.exact = True
    assert counts.work(S // 4, after_idle=False)
    assert not counts.work(S // 2, after_idle=True)
    counts.rest(3 * S // 4)
    counts.write(ring, S)
    ((ns, idle_ns, *_),) = of(ring, protocol.RECORD_SERVE)
    assert (ns, idle_ns) == (S, S // 2)


@pytest.mark.parametrize(
    ("environ", "engine", "expected"),
    [
        ({}, 0, ("tiny", "start-1")),
        ({"WARPWATCH_POD_UID": "p" * 128}, 2, ("tiny", "p" * 124 + "-dp2")),
        ({"WARPWATCH_JOB": "chat", "WARPWATCH_RUN": "r", "WARPWATCH_POD_UID": "p"}, 0,
         ("chat", "r")),
    ],
)  # fmt: skip
def test_a_servers_process_is_named_by_its_model_and_its_replica(environ, engine, expected):
    place = {"kind": "serve", "job": "tiny", "run": "start-1", "rank": 3, "world_size": 4}
    place["engine"] = engine
    said = describe(None, environ, place)
    assert ((said["job"], said["run"]), said["rank"]) == (expected, 3)


SERVES = """
import sys, warpwatch
monitor = warpwatch.attach(job="chat", kind="serve", place={"role": "frontend", "rank": 1})
sys.stdin.readline()
while monitor.clock.ring is None:
    pass
with monitor.iteration(prefill_tokens=8):
    pass
"""


def test_a_servers_process_is_seen_before_its_first_iteration_and_ends_cleanly(folder):
    with program(folder, SERVES) as process:
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


ENGINE = """
import multiprocessing, sys, time

def serve(how):
    import warpwatch
    monitor = warpwatch.attach(job="chat", kind="serve")
    while monitor.clock.ring is None:
        time.sleep(0.01)
    raise {"error": ValueError("engine"), "exit": SystemExit(0)}[how]

if __name__ == "__main__":
    if sys.argv[2:]:
        __import__("warpwatch").attach()
    child = multiprocessing.get_context("fork").Process(target=serve, args=(sys.argv[1],))
    child.start()
    child.join()
"""


@pytest.mark.parametrize("parent", [[], ["attached"]])
@pytest.mark.parametrize(("how", "events"), [("error", ["exception", "exit"]), ("exit", ["exit"])])
def test_an_exception_that_ends_a_child_of_multiprocessing_is_reported(folder, how, events, parent):
    with program(folder, ENGINE, how, *parent) as process:
        process.wait()
    assert folder.ring().event_names() == events
