"""A restart of the daemon in the middle of anything: every anomaly stays one anomaly."""

from collections.abc import Iterator

import msgspec
import pytest

from tests.detection.streams import (
    EPOCH_S,
    Job,
    again,
    detection,
    fed,
    lived,
    lives,
    opened,
    restarted,
)
from warpwatch_detection.anomalies import snapshot
from warpwatch_detection.config import DetectionConfig
from warpwatch_telemetry.records import Clock, RankEvent, Record, Step


def training(seed: int) -> Iterator[Record]:
    job = Job(ranks=4, step_s=0.5, noise=0.02, seed=seed)
    yield from job.seen()
    yield from job.steps(300)
    yield from job.steps(80, compute=lambda _, rank: 0.2 if rank == 1 else 0.0)
    yield from job.steps(300)
    yield from job.steps(80, wait=lambda *_: 0.3)
    yield from job.steps(300)
    yield RankEvent(job.time + 12, "llama", 2, "stopped", {"silent_reason": "stopped"})
    yield Clock(job.time + 200)
    yield RankEvent(job.time + 201, "llama", 2, "resumed")
    job.time += 210
    yield from job.steps(60)
    yield RankEvent(job.time, "llama", 3, "exception", {"type": "ValueError"})
    yield RankEvent(job.time + 1, "llama", 3, "died")
    for _ in range(3):
        job.time += 400
        yield Clock(job.time)


@pytest.mark.parametrize("every", [211, 1009, 1501])
def test_restarts_at_any_time_change_no_anomaly(every):
    records = list(training(seed=3))
    whole = lives(detection(), records)
    assert {life[0] for life in whole} >= {"straggler", "data_stall", "hang", "crash"}
    assert lives(detection(), records, every) == whole


@pytest.mark.parametrize(
    ("version", "changed", "says"),
    [
        (9, {}, ", judged from the start since the daemon was restarted"),
        (1, {"disabled": ["hang"]}, ""),
    ],
)
def test_a_detector_with_another_state_learns_again_and_one_that_is_off_ends_its_own(
    version, changed, says
):
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), detection()
    next(one for one in engine.runner.detectors if one.kind == "hang").state_version = version
    opened(engine, [*job.steps(300), Clock(job.time + 200)])
    (before,) = engine.active
    fresh, (closed,) = restarted(engine, job.time + 205, **changed)
    assert (closed.id, closed.kind, closed.end_time) == (before.id, "hang", job.time + 200)
    assert closed.summary.endswith(says)
    assert fresh.active == ()


def test_an_event_is_held_whatever_becomes_of_its_detector():
    engine = detection()
    engine.feed(Step(EPOCH_S, "llama", 0, 0, 0.5))
    engine.feed(RankEvent(EPOCH_S + 1, "llama", 0, "exception"))
    fresh, closed = restarted(engine, EPOCH_S + 5, disabled=["crash"])
    assert closed == []
    assert [(one.kind, one.end_time) for one in fed(fresh, [Clock(EPOCH_S + 700)])] == [
        ("crash", EPOCH_S + 601)
    ]


def test_the_daemons_absence_is_no_silence_of_the_ranks():
    job, engine = Job(ranks=2), detection()
    opened(engine, job.steps(300))
    back_time = job.time + 3600
    fresh, _ = restarted(engine, back_time)
    # The ring held the newest steps alone, and the process lives.
    job.time = back_time - 1
    job.step += 10_000
    assert opened(fresh, [Clock(back_time)]) == []
    assert opened(fresh, job.steps(300)) == []
    assert opened(fresh, [Clock(job.time + 60)]) == []


def test_ranks_that_are_silent_from_the_restart_on_hang_after_the_usual_time():
    timeout_s = DetectionConfig().hang.timeout_s
    job, engine = Job(ranks=2), detection()
    read = [*job.seen(), *job.steps(300)]
    opened(engine, read)
    silent_s = 30.0
    engine.feed(Clock(job.time + silent_s))
    back_time = job.time + silent_s + 1000
    fresh, _ = restarted(engine, back_time)
    assert opened(fresh, again(read)) == []
    assert opened(fresh, [Clock(back_time + timeout_s - silent_s - 2)]) == []
    (hang,) = opened(fresh, [Clock(back_time + 1000)])
    assert hang.kind == "hang"
    assert hang.time >= back_time + timeout_s - silent_s - 1


def test_a_rank_that_ended_while_no_daemon_ran_takes_its_anomaly_with_it():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    lived(job, engine, "300; 60 compute 1 0.2 -> straggler 1")
    (before,) = engine.active
    back_time = job.time + 600
    fresh, _ = restarted(engine, back_time)
    changes = fed(fresh, [Clock(back_time + at) for at in (0, 15, 25)])
    assert [(one.id, one.end_time) for one in changes] == [(before.id, back_time + 25)]
    # Nor does a clock that is set make it a hang.
    fresh.skip_to(back_time + 7200)
    assert opened(fresh, [Clock(back_time + at) for at in (7200, 7215, 27_200)]) == []


def test_a_new_training_of_the_same_name_is_taken_for_what_it_is():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, [*job.seen(), *job.steps(300)])
    fresh, _ = restarted(engine, job.time + 60)
    new = Job(ranks=2, step_s=0.1, noise=0.02)
    new.time = job.time + 30
    assert opened(fresh, [*new.seen(), *new.steps(600)]) == []
    lived(new, fresh, "1; 400 compute 1 0.05 -> straggler 1")


def test_without_the_engines_part_nothing_is_given_back():
    engine = detection()
    opened(engine, Job().steps(100))
    saved = msgspec.msgpack.decode(snapshot.save(engine.parts()), type=snapshot.Snapshot)
    del saved.parts["engine"]
    assert snapshot.restore(saved, detection().parts()) == set(engine.parts())
