"""The stream of records that fleets read: each once, bounded, by shards, after gaps."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.manual_clock import ManualClock
from warpwatch_daemon.state import record_stream
from warpwatch_daemon.state.record_stream import KEPT_S, WHOLE, Batch, RecordStream, Shard
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.jobs import JobId, shard_key
from warpwatch_telemetry.records import Clock, DeviceReading, End, RankSeen, Step


class Node:
    """A stream with a clock of the test's."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.stream = RecordStream(self.clock.monotonic)

    def step(self, number: int, job: str = "llama") -> None:
        self.stream.put([Step(1000.0 + number, job, 0, number, 1.0)])

    def read(self, after: str | None, shard: Shard = WHOLE) -> tuple[Batch, list[Any]]:
        batch = self.stream.read(after, shard)
        return batch, [json.loads(line) for line in batch.lines.splitlines()]


@pytest.fixture
def node() -> Node:
    return Node()


def steps(lines: list[Any]) -> list[int]:
    return [line["step"] for line in lines if line["type"] == "step"]


ANOMALY = Anomaly(
    time=1000.0, severity="warning", summary="slow", job="llama", id="a-1", kind="straggler"
)


def test_a_reader_gets_what_comes_after_its_cursor_once(node):
    first, lines = node.read(None)
    assert lines == []
    node.step(1)
    node.step(2)
    second, lines = node.read(first.cursor)
    assert steps(lines) == [1, 2]
    node.step(3)
    assert steps(node.read(second.cursor)[1]) == [3]
    assert steps(node.read(first.cursor)[1]) == [1, 2, 3]


def test_a_new_reader_hears_of_the_ranks_and_anomalies_that_there_are(node):
    node.stream.put([RankSeen(900.0, "llama", 0, 2), RankSeen(900.0, "llama", 1, 2)])
    node.stream.put([End(950.0, "llama", 1)])
    node.stream.put_anomaly(ANOMALY)
    node.stream.put_anomaly(replace(ANOMALY, id="a-2", end_time=960.0))
    _, lines = node.read(None)
    assert [(line["type"], line.get("rank")) for line in lines[:1]] == [("rank", 0)]
    assert [line["anomaly"]["id"] for line in lines[1:]] == ["a-1"]


def test_a_reader_that_was_away_too_long_is_told_how_much_it_lost(node, monkeypatch):
    monkeypatch.setattr(record_stream, "MAX_BYTES", 1000)
    first, _ = node.read(None)
    node.stream.put([RankSeen(900.0, "llama", 0, 2)])
    for number in range(100):
        node.step(number)
    _, lines = node.read(first.cursor)
    kept = steps(lines)
    assert kept[-1] == 99
    assert [line["type"] for line in lines[:2]] == ["gap", "rank"]
    assert lines[0]["lost"] == 101 - len(kept)


def test_the_cursor_of_another_life_of_the_daemon_is_a_gap_of_unknown_size(node):
    before, _ = node.read(None)
    node = Node()
    node.read(None)
    node.step(7)
    _, lines = node.read(before.cursor)
    assert lines[0] == {"type": "gap"}
    assert steps(lines) == [7]


def test_nothing_is_kept_while_nobody_reads(node):
    node.step(1)
    first, lines = node.read(None)
    assert lines == []
    node.step(2)
    node.clock.advance(KEPT_S + 1)
    node.step(3)
    assert node.stream._lines == type(node.stream._lines)()
    _, lines = node.read(first.cursor)
    assert [line["type"] for line in lines] == ["gap"]


def test_each_shard_gets_its_jobs_and_no_other(node):
    cursor = node.read(None)[0].cursor
    jobs = [f"job-{number}" for number in range(20)]
    for job in jobs:
        node.step(1, job)
    told = [{line["job"] for line in node.read(cursor, Shard(index, 3))[1]} for index in range(3)]
    assert set().union(*told) == set(jobs)
    assert sum(map(len, told)) == len(jobs)
    assert all(told)


def test_a_second_run_that_one_node_marks_is_in_the_shard_of_the_same_job(node):
    run = "20260101T000000-abcdef"
    plain = JobId("uid/1", "llama", run)
    marked = JobId("uid/1", "llama#" + hashlib.sha256(run.encode()).hexdigest()[:6], run)
    assert marked.base_name == "llama"
    assert shard_key(plain) == shard_key(marked)


def test_a_batch_is_bounded_and_says_that_there_is_more(node, monkeypatch):
    monkeypatch.setattr(record_stream, "MAX_BATCH_BYTES", 500)
    batch, _ = node.read(None)
    for number in range(100):
        node.step(number)
    seen: list[int] = []
    batches = 0
    while True:
        batch, lines = node.read(batch.cursor)
        seen += steps(lines)
        batches += 1
        if not batch.more:
            break
    assert seen == list(range(100))
    assert batches > 5


def test_a_device_is_read_once_in_five_seconds_and_clocks_are_each_batchs_own(node):
    cursor = node.read(None)[0].cursor
    for second in range(11):
        node.stream.put([DeviceReading(1000.0 + second, "GPU-1", {}), Clock(1000.0 + second)])
        node.clock.advance(1.0)
    _, lines = node.read(cursor)
    assert [(line["type"], line["time"]) for line in lines] == [
        ("device", 1000.0), ("device", 1005.0), ("device", 1010.0),
    ]  # fmt: skip


def test_an_anomaly_and_a_capture_come_whole_when_they_change(node):
    cursor = node.read(None)[0].cursor
    node.stream.put_anomaly(ANOMALY)
    node.stream.put_anomaly(replace(ANOMALY, end_time=1010.0))
    capture = Capture(id="c-1", request=CaptureRequest("llama", "torch", "manual"), time=1.0)
    node.stream.put_captures([capture])
    node.stream.put_captures([capture])
    _, lines = node.read(cursor)
    assert [line["type"] for line in lines] == ["anomaly", "anomaly", "capture"]
    assert lines[1]["anomaly"]["end_time"] == 1010.0
    assert lines[2]["capture"]["request"]["job"] == "llama"


@pytest.mark.parametrize("cursor", ["", "x", "00000000-", "00000000-1x", "-1"])
def test_what_is_no_cursor_is_refused(node, cursor):
    with pytest.raises(ValueError, match="a cursor of this stream is needed"):
        node.read(cursor)
