"""Values that a process writes into the detail of its events."""

import msgspec
import pytest

from tests.detection.streams import Job, alone, opened
from warpwatch_detection import ranks
from warpwatch_detection.detector import detail_number
from warpwatch_detection.detectors import deaths
from warpwatch_telemetry.records import RankEvent, RankSeen


@pytest.mark.parametrize("wrong", [True, "3", None, float("nan"), float("-inf"), 10**400])
def test_only_finite_numbers_are_read(wrong: object) -> None:
    event = RankEvent(1.0, "a", 0, "memory", {"wrong": wrong, "whole": 3, "part": -0.5})
    assert [detail_number(event, name) for name in event.detail] == [None, 3.0, -0.5]


def test_no_number_of_an_event_stops_a_detector() -> None:
    job, engine = Job(ranks=2), alone("gc_pause", "hang", "memory_leak", "memory_pressure")
    opened(engine, [*job.seen(), *job.steps(100)])
    names = ("duration_s", "step", "cpu_s", "io_bytes", "anonymous_bytes", "reserved_bytes")
    for value in (10**400, -(10**400), float("nan"), float("inf"), -5, True):
        for event in ("gc_pause", "process", "memory"):
            engine.feed(RankEvent(job.time, "llama", 0, event, dict.fromkeys(names, value)))
    assert engine.pop_failure() is None


def test_rank_numbers_that_churn_are_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(ranks, "MAX_DEPARTED", 500)
    monkeypatch.setattr(deaths, "MAX_GONE", 500)
    job, engine = Job(ranks=1), alone("crash", "oom", "hang", "memory_leak", "memory_pressure")
    opened(engine, [*job.seen(), *job.steps(10)])
    sizes = []
    for rank in range(1, 3_001):
        job.time += 1
        engine.feed(RankSeen(job.time, "llama", rank, 2, "GPU-1"))
        engine.feed(RankEvent(job.time, "llama", rank, "died"))
        if rank in (1500, 3000):
            sizes.append(
                {
                    name: len(msgspec.msgpack.encode(p.owner.state))
                    for name, p in engine.parts().items()
                }
            )
    grown = {name: size - sizes[0][name] for name, size in sizes[1].items()}
    assert [name for name, size in grown.items() if size > 500] == []
