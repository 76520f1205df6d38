"""step_regression, and what no step detector may raise, on streams whose truth is known."""

from __future__ import annotations

import pytest

from tests.detection.streams import Job, detection, opened
from warpwatch_telemetry.records import RankEvent


@pytest.mark.parametrize(("step_s", "noise"), [(0.02, 0.3), (0.04, 0.2), (0.5, 0.01)])
def test_50000_healthy_steps_with_noise_raise_nothing(step_s, noise):
    job = Job(ranks=2, step_s=step_s, noise=noise)
    engine = detection()
    assert opened(engine, job.seen()) == []
    assert opened(engine, job.steps(50_000)) == []


def test_checkpoints_of_ten_steps_every_250_raise_nothing():
    job = Job(ranks=4, step_s=0.5, noise=0.02)
    checkpoints = job.steps(5_000, pause=lambda step, _: 5.0 if step and step % 250 == 0 else 0.0)
    assert opened(detection(), checkpoints) == []


def test_lone_slow_steps_and_lone_slow_batches_raise_nothing():
    job = Job(ranks=4, step_s=0.2, noise=0.02)
    records = job.steps(
        4_000,
        compute=lambda step, rank: 0.2 if step % 97 == rank else 0.0,
        wait=lambda step, rank: 0.3 if step % 131 == rank else 0.0,
    )
    assert opened(detection(), records) == []


def test_more_work_on_all_ranks_is_a_regression_within_15_seconds():
    job, engine = Job(step_s=0.04, noise=0.2), detection()
    assert opened(engine, job.steps(500)) == []
    begin = job.time
    found = opened(engine, job.steps(400, compute=lambda *_: 0.024))
    assert [(a.kind, a.rank) for a in found] == [("step_regression", None)]
    assert found[0].time - begin < 15
    assert (found[0].value or 0) / (found[0].baseline or 1) == pytest.approx(1.6, abs=0.3)


def test_a_shift_of_ten_percent_is_found_where_noise_is_small():
    job, engine = Job(ranks=8, step_s=0.5, noise=0.02), detection()
    assert opened(engine, job.steps(500)) == []
    found = opened(engine, job.steps(60, compute=lambda *_: 0.05))
    assert [a.kind for a in found] == ["step_regression"]


def test_a_new_regime_is_found_once_and_then_is_normal():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    assert opened(engine, job.steps(500)) == []
    assert len(opened(engine, job.steps(3_000, compute=lambda *_: 0.25))) == 1
    assert engine.active == ()
    assert [a.kind for a in opened(engine, job.steps(100, compute=lambda *_: 0.5))] == [
        "step_regression"
    ]


def test_a_job_that_got_faster_is_not_reported_but_remembered():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(500))
    job.step_s = 0.3
    assert opened(engine, job.steps(500)) == []
    job.step_s = 0.5
    assert [a.kind for a in opened(engine, job.steps(60))] == ["step_regression"]


def test_a_regression_that_went_away_is_closed():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(500))
    opened(engine, job.steps(100, compute=lambda *_: 0.2))
    assert len(engine.active) == 1
    opened(engine, job.steps(100))
    assert not engine.active
    (closed,) = engine.history
    assert closed.kind == "step_regression"
    assert (closed.end_time or 0) > closed.time


def test_steps_of_a_capture_are_not_judged():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(500))
    for rank in (0, 1):
        engine.feed(RankEvent(job.time, "llama", rank, "capture_started"))
    assert opened(engine, job.steps(100, compute=lambda *_: 0.2)) == []
    for rank in (0, 1):
        engine.feed(RankEvent(job.time, "llama", rank, "capture_finished"))
    assert opened(engine, job.steps(100)) == []


def test_a_disabled_detector_says_nothing():
    job = Job(ranks=2, step_s=0.5, noise=0.02)
    engine = detection(step_regression={"enabled": False})
    assert opened(engine, job.steps(500)) == []
    assert opened(engine, job.steps(200, compute=lambda *_: 0.2)) == []
