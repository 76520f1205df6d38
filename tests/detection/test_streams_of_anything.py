"""With any records no detector fails, and every state can be saved and restored."""

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby, product
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.detection.streams import EPOCH_S, Job, alone, fed, on, opened, restart
from warpwatch_daemon.cli.replay import LogReader
from warpwatch_detection import ranks
from warpwatch_detection.detector import detail_number
from warpwatch_detection.detectors import deaths
from warpwatch_detection.engine import Detection
from warpwatch_detection.replay import LogReplay
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.log import encode
from warpwatch_telemetry.records import Clock, DeviceReading, End, RankEvent, RankSeen, Record, Step

# A failing stream is not made smaller: that takes minutes.
BOUNDED = settings(
    max_examples=12,
    derandomize=True,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.generate),
)
JOBS = st.sampled_from(["llama", "other"])
RANKS = st.integers(0, 3)
DEVICES = st.sampled_from([f"GPU-{index}" for index in range(4)])
STEP_NUMBERS = st.integers(0, 200) | st.just(10**18)
# Claims of a rank; a log would refuse the last four.
EVENTS = (
    "capture_armed", "capture_late", "capture_started", "capture_finished", "capture_failed",
    "capture_disarmed", "exception", "oom", "gc_pause", "memory", "process", "compared", "training",
    "finished", "records_lost", "stopped", "resumed", "died",
)  # fmt: skip
DURATIONS_S = st.one_of(
    st.floats(0, 10),
    st.sampled_from([0.0, 1e-9, 1e9, 1e300, -1.0, float("inf"), float("-inf"), float("nan")]),
)
PHASES_S = st.dictionaries(
    st.sampled_from(["comm", "data_wait", "checkpoint", "eval", "forward", "own"]), DURATIONS_S
)
COUNTS = st.integers(0, 10**5) | st.just(10**18)
# Seconds to the next record, time going back among them.
GAPS_S = st.sampled_from([0.0, 0.0, 1e-3, 0.5, 10.0, 200.0, 1e4, 1e6, -0.5, -100.0])
PLAIN_METRICS = [name for name, row in sorted(CATALOGUE.items()) if not row.labels]
LABELS = st.sampled_from(["", "1", "79", "hw_thermal", "sm"])
SERIES = st.sampled_from(sorted(CATALOGUE)).flatmap(
    lambda name: st.tuples(st.just(name), st.tuples(*[LABELS] * len(CATALOGUE[name].labels)))
)
# A few series with any value, or all that have no labels with much the same one.
METRICS = st.one_of(
    st.dictionaries(SERIES, st.floats() | st.floats(0, 100) | st.just(1e18), max_size=8),
    st.lists(st.sampled_from([0.0, 1.0, 2.0, 1e18]), min_size=1, max_size=3).map(
        lambda values: {
            (name, ()): values[index % len(values)] for index, name in enumerate(PLAIN_METRICS)
        }
    ),
)
DETAILS = st.dictionaries(
    st.sampled_from(["duration_s", "generation", "step", "silent_reason", "exception", "id"]),
    st.none() | st.floats() | st.integers(-1, 10**18) | st.text(max_size=3) | st.lists(st.none()),
    max_size=4,
)
RECORDS = st.one_of(
    st.builds(
        Step, st.just(0.0), JOBS, RANKS, STEP_NUMBERS, DURATIONS_S, st.none() | DURATIONS_S,
        PHASES_S, st.none() | COUNTS, COUNTS, COUNTS, st.booleans(),
    ),
    st.builds(RankSeen, st.just(0.0), JOBS, RANKS, st.integers(1, 8), st.none() | DEVICES),
    st.builds(DeviceReading, st.just(0.0), DEVICES, METRICS, st.booleans()),
    st.builds(RankEvent, st.just(0.0), JOBS, RANKS, st.sampled_from(EVENTS), DETAILS),
    st.builds(Clock, st.just(0.0)),
    st.builds(End, st.just(0.0), JOBS, st.none() | RANKS),
)  # fmt: skip
# A stretch of one job as it trains: (ranks, steps, seconds a step, slow rank, by how much).
STRETCHES = st.tuples(
    st.integers(1, 4), st.integers(1, 150), st.sampled_from([0.05, 0.5, 5.0]), RANKS,
    st.sampled_from([1.0, 1.0, 1.5, 20.0]),
)  # fmt: skip
STREAMS = st.lists(
    st.tuples(GAPS_S, RECORDS) | STRETCHES.map(lambda stretch: (0.0, stretch)), max_size=25
)


def stream(pieces: Sequence[tuple[float, Any]]) -> Iterator[Record]:
    """The records of what was drawn, one after the other in time, but where a gap is negative."""
    now, number, noise = EPOCH_S, 0, random.Random(1)
    for gap_s, piece in pieces:
        now += gap_s
        if not isinstance(piece, tuple):
            yield replace(piece, time=now)
            continue
        ranks, steps, step_s, slow, factor = piece
        for _ in range(steps):
            now += step_s
            number += 1
            for rank in range(ranks):
                took = step_s * noise.uniform(0.95, 1.05) * (factor if rank == slow else 1.0)
                phases = {"comm": 0.1 * step_s, "data_wait": 0.01 * step_s * noise.random()}
                memory = 10**9 + number * 10**6
                yield Step(now, "llama", rank, number, took, None, phases, memory, 8, 4096)


@BOUNDED
@given(STREAMS, st.integers(0, 1000))
def test_no_detector_fails_and_a_restart_in_the_middle_changes_nothing(pieces, before):
    records = list(stream(pieces))
    steady, restarted = Detection(), Detection()
    changes = fed(steady, records)
    for anomaly in changes:
        assert anomaly.summary
        assert "\n" not in anomaly.summary
        json.dumps(asdict(anomaly), allow_nan=False)
    for statuses in steady.statuses().values():
        assert all(status.text for status in statuses)
    again = fed(restarted, records[:before])
    restart(restarted)
    assert repr([*again, *fed(restarted, records[before:])]) == repr(changes)


def is_loggable(record: Record) -> bool:
    """Return whether the log accepts the record: finite numbers, no negative duration."""
    if not isinstance(record, Step):
        return not isinstance(record, RankEvent) or "time" not in record.detail
    numbers = [record.duration_s, record.gpu_s or 0.0, *record.phases_s.values()]
    return record.duration_s >= 0 and all(abs(number) < float("inf") for number in numbers)


@BOUNDED
@given(STREAMS)
def test_a_replay_says_what_the_engine_says(pieces: list[Any]) -> None:
    records = [record for record in stream(pieces) if is_loggable(record)]
    replay, changes = LogReplay(), fed(Detection(), records)
    log = [json.dumps(encode(record)) + "\n" for record in records]
    raised = list(replay.run(LogReader().records(log))) if log else []
    assert repr(list(replay.anomalies.values())) == repr(list({a.id: a for a in changes}.values()))
    first = {anomaly.id: anomaly for anomaly in reversed(changes)}
    assert {repr(anomaly) for anomaly in raised} == {repr(anomaly) for anomaly in first.values()}


def one_slow_rank() -> list[Record]:
    job = Job(ranks=4, step_s=0.5, noise=0.02)
    quick, slow = job.steps(300), job.steps(100, compute=on(2, 0.3))
    return [*job.seen(), *quick, *slow]


def test_the_order_of_ranks_within_a_time_means_nothing() -> None:
    records = one_slow_rank()
    shuffle: Callable[[list[Record]], None] = random.Random(1).shuffle
    mixed: list[Record] = []
    for _, same_time in groupby(records, key=lambda record: record.time):
        together = list(same_time)
        shuffle(together)
        mixed += together
    first, second = Detection(), Detection()
    assert mixed != records
    reported = [summary(anomaly) for anomaly in fed(first, records)]
    assert ("straggler", 2) in {(kind, rank) for kind, rank, *_ in reported}
    assert [summary(anomaly) for anomaly in fed(second, mixed)] == reported


def summary(anomaly: Anomaly) -> tuple[Any, ...]:
    return anomaly.kind, anomaly.rank, anomaly.step, anomaly.begin_step, anomaly.time


# --- values that a process writes into the detail of its events ---


@pytest.mark.parametrize("wrong", [True, "3", None, float("nan"), float("-inf"), 10**400])
def test_only_finite_numbers_are_read(wrong: object) -> None:
    event = RankEvent(1.0, "a", 0, "memory", {"wrong": wrong, "whole": 3, "part": -0.5})
    assert [detail_number(event, name) for name in event.detail] == [None, 3.0, -0.5]


def test_no_number_of_an_event_stops_a_detector() -> None:
    job, engine = Job(ranks=2), alone("gc_pause", "hang", "memory_leak", "memory_pressure")
    opened(engine, [*job.seen(), *job.steps(100)])
    names = ("duration_s", "step", "cpu_s", "io_bytes", "anonymous_bytes", "reserved_bytes")
    for value in (10**400, -(10**400), float("nan"), float("inf"), -5, True):
        for event, rank in product(("gc_pause", "process", "memory"), (0, 9)):
            engine.feed(RankEvent(job.time, "llama", rank, event, dict.fromkeys(names, value)))
    assert engine.pop_failure() is None


def test_rank_numbers_that_churn_are_not_remembered_for_ever(monkeypatch):
    monkeypatch.setattr(ranks, "MAX_DEPARTED", 500)
    monkeypatch.setattr(deaths, "MAX_GONE", 500)
    job, engine = Job(ranks=1), alone("crash", "oom", "hang", "memory_leak", "memory_pressure")
    opened(engine, [*job.seen(), *job.steps(10)])
    sizes = []
    for rank in range(1, 3_001):
        job.time += 0.1
        engine.feed(RankSeen(job.time, "llama", rank, 2, "GPU-1"))
        engine.feed(RankEvent(job.time, "llama", rank, "died"))
        if rank in (1500, 3000):
            sizes.append(
                {name: len(msgspec.msgpack.encode(p.state)) for name, p in engine.parts().items()}
            )
    grown = {name: size - sizes[0][name] for name, size in sizes[1].items()}
    assert [name for name, size in grown.items() if size > 500] == []
