"""The stream of records that fleets read: each once, bounded, by shards, after gaps."""

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.manual_clock import ManualClock
from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.records import Clock, DeviceReading, End, RankSeen, Step

ANOMALY = Anomaly(
    time=1000.0, severity="warning", summary="slow", job="llama", id="a-1", kind="straggler"
)
CAPTURE = Capture("c-1", CaptureRequest("llama", "torch", "manual"), 1.0)


class Node:
    """A stream, its clock, and the cursor of a reader (``at``) that reads on with ``read``."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.stream = RecordStream(self.clock.monotonic)
        self.at: str | None = None
        self.more = False

    def step(self, *numbers: int, job: str = "llama") -> None:
        for number in numbers:
            self.stream.put([Step(1000.0 + number, job, 0, number, 1.0)])

    def read(self, index: int = 0, of: int = 1) -> list[Any]:
        portion = self.stream.portion(self.at)
        self.at, self.more = portion.cursor, portion.more
        return [json.loads(line) for line in portion.text(index, of).splitlines()]


@pytest.fixture
def node():
    node = Node()
    assert node.read() == []
    return node


def steps(lines: list[Any]) -> list[int]:
    return [line["step"] for line in lines if line["type"] == "step"]


def test_a_reader_gets_what_comes_after_its_cursor_once(node):
    first = node.at
    node.step(1, 2)
    assert steps(node.read()) == [1, 2]
    node.step(3)
    assert steps(node.read()) == [3]
    node.at = first
    assert steps(node.read()) == [1, 2, 3]


def test_a_new_reader_hears_of_the_ranks_anomalies_captures_and_runs_that_there_are():
    node = Node()
    node.stream.put([RankSeen(900.0, "llama", 0, 2), RankSeen(900.0, "llama", 1, 2)])
    node.stream.put([End(950.0, "llama", 1)])
    node.stream.put_anomaly(ANOMALY)
    node.stream.put_anomaly(replace(ANOMALY, id="a-2", end_time=960.0))
    node.stream.put_captures([replace(CAPTURE, id=f"c-{number}") for number in range(21)])
    node.stream.put_runs([RunSummary("uid/1", "llama", "r1", 2.0, 1.0)])
    rank, anomaly, *captures, run = node.read()
    assert (rank["type"], rank["rank"]) == ("rank", 0)
    assert anomaly["anomaly"]["id"] == "a-1"
    assert [one["capture"]["id"] for one in captures] == [f"c-{number}" for number in range(1, 21)]
    assert run["run"]["run"] == "r1"


def test_a_reader_that_was_away_too_long_is_told_how_much_it_lost(node):
    node.stream.put([RankSeen(900.0, "llama", 0, 2)])
    node.step(10)
    room = 2**20 - len(node.stream._lines[-1].text)
    node.step(*range(11, 28), job="llama" + "x" * room)
    gap, rank, *lines = node.read()
    assert (gap, rank["type"]) == ({"type": "gap", "lost": 3}, "rank")
    while node.more:
        lines += node.read()
    # 16 of 1 MiB each.
    assert steps(lines) == list(range(12, 28))


def test_lines_wait_ten_minutes_for_the_bus_and_those_that_are_dropped_are_counted(node):
    node.stream.keep()
    for number in (0, 1, 2, 3):
        node.step(number)
        assert number or steps(node.read()) == [0]
        node.clock.advance(400)
    gap, *lines = node.read()
    assert (gap, steps(lines)) == ({"type": "gap", "lost": 2}, [3])


def test_the_cursor_of_another_life_of_the_daemon_is_a_gap_of_unknown_size(node):
    after = Node()
    after.read()
    after.at = node.at
    after.step(7)
    gap, step = after.read()
    assert gap == {"type": "gap"}
    assert steps([step]) == [7]


def test_nothing_is_kept_while_nobody_reads():
    node = Node()
    node.step(1)
    assert node.read() == []
    node.clock.advance(600)
    node.step(2)
    assert len(node.stream._lines) == 1
    node.clock.advance(1.0)
    node.step(3)
    assert not node.stream._lines
    assert [line["type"] for line in node.read()] == ["gap"]


def test_each_shard_gets_its_jobs_and_no_other(node):
    jobs, first = [f"job-{number}" for number in range(20)], node.at
    # A second run of the same name has a mark, and goes to the same shard.
    for job in (*jobs, *(f"{job}#e3b0c4" for job in jobs)):
        node.step(1, job=job)
    node.stream.put([DeviceReading(1000.0, "GPU-1", {})])
    told = []
    for index in range(3):
        node.at = first
        told.append({line.get("job", "device").partition("#")[0] for line in node.read(index, 3)})
    assert set().union(*told) == {*jobs, "device"}
    assert sum(map(len, told)) == len(jobs) + 3
    assert set.intersection(*told) == {"device"}


def test_a_batch_is_bounded_and_says_that_there_is_more(node):
    node.step(10)
    room = 2**16 - len(node.stream._lines[-1].text)
    node.step(*range(11, 21), job="llama" + "x" * room)
    # The first is short: five are the first to have 256 KiB.
    batches = [steps(node.read())]
    while node.more:
        batches.append(steps(node.read()))
    assert batches == [[10, 11, 12, 13, 14], [15, 16, 17, 18], [19, 20]]


def test_a_device_is_read_once_in_five_seconds_and_clocks_are_each_batchs_own(node):
    for second in range(11):
        node.stream.put([DeviceReading(1000.0 + second, "GPU-1", {}), Clock(1000.0 + second)])
        node.clock.advance(1.0)
    assert [(line["type"], line["time"]) for line in node.read()] == [
        ("device", 1000.0), ("device", 1005.0), ("device", 1010.0),
    ]  # fmt: skip


def test_an_anomaly_and_a_capture_come_whole_when_they_change(node):
    node.stream.put_anomaly(ANOMALY)
    node.stream.put_anomaly(replace(ANOMALY, end_time=1010.0))
    node.stream.put_captures([CAPTURE])
    node.stream.put_captures([CAPTURE])
    opened, closed, captured = node.read()
    assert (opened["type"], captured["type"]) == ("anomaly", "capture")
    assert closed["anomaly"]["end_time"] == 1010.0
    assert captured["capture"]["request"]["job"] == "llama"


@pytest.mark.parametrize("cursor", ["", "x", "00000000-", "00000000-1x", "-1"])
def test_what_is_no_cursor_is_refused(node, cursor):
    node.at = cursor
    with pytest.raises(ValueError, match="a cursor of this stream is needed"):
        node.read()
