"""gc_pause: pauses that the shim tells, and a rank's slow steps at equal gaps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest

from tests.detection.alone import alone
from tests.detection.streams import Job, opened
from warpwatch_telemetry.records import RankEvent, Record

STEP_S = 0.2


def with_events(
    job: Job, count: int, pause_s: Callable[[int, int], float], generation: int = 2
) -> Iterator[Record]:
    """Steps that all ranks spend alike, and what the shim tells of the pauses in them."""
    for step in job.steps(count):
        yield step
        if (duration_s := pause_s(step.step, step.rank)) > 0:
            detail = {"duration_s": duration_s, "generation": generation, "step": step.step}
            yield RankEvent(step.time, step.job, step.rank, "gc_pause", detail)


def regular(period: int, rank: int, pause_s: float) -> Callable[[int, int], float]:
    return lambda step, number: pause_s if number == rank and step % period == 5 else 0.0


@pytest.mark.parametrize("period", [7, 20, 41, 60])
def test_a_rank_that_pauses_at_equal_gaps_is_named_within_five_periods(period):
    job, engine = Job(ranks=8, step_s=STEP_S, noise=0.01), alone("gc_pause")
    assert opened(engine, job.steps(500)) == []
    found = opened(engine, job.steps(5 * period, compute=regular(period, 3, 0.15)))
    assert [(a.kind, a.rank, a.severity) for a in found] == [("gc_pause", 3, "warning")]
    assert f"every {period} steps" in found[0].summary
    assert found[0].value == pytest.approx(0.15 / (period * STEP_S), rel=0.4)
    assert abs((found[0].begin_step or 0) - 500) <= period


def test_gaps_that_vary_by_a_step_are_equal():
    job, engine = Job(ranks=4, step_s=STEP_S, noise=0.01), alone("gc_pause")
    opened(engine, job.steps(300))
    steps = {330, 359, 390, 420, 449}
    found = opened(
        engine, job.steps(200, compute=lambda s, r: 0.1 if r == 2 and s in steps else 0.0)
    )
    assert [(a.kind, a.rank) for a in found] == [("gc_pause", 2)]


def test_a_pause_hidden_in_a_checkpoint_of_all_ranks_breaks_no_chain():
    job, engine = Job(ranks=4, step_s=STEP_S, noise=0.01), alone("gc_pause")
    opened(engine, job.steps(300))
    found = opened(
        engine,
        job.steps(
            170,
            compute=regular(30, 1, 0.1),
            pause=lambda step, _: 30.0 if step == 367 else 0.0,
        ),
    )
    assert [(a.kind, a.rank) for a in found] == [("gc_pause", 1)]


def test_lone_pauses_of_random_ranks_are_none():
    chance = random.Random(3)
    paused = {(step, chance.randrange(8)): 0.2 for step in range(5_000) if chance.random() < 0.02}
    job, engine = Job(ranks=8, step_s=STEP_S, noise=0.02), alone("gc_pause")
    pauses = job.steps(5_000, compute=lambda step, rank: paused.get((step, rank), 0.0))
    assert opened(engine, pauses) == []


def test_frequent_pauses_of_one_rank_without_a_period_are_none():
    chance = random.Random(4)
    paused = {step: chance.uniform(0.1, 0.2) for step in range(4_000) if chance.random() < 0.03}
    job, engine = Job(ranks=4, step_s=STEP_S, noise=0.02), alone("gc_pause")
    pauses = job.steps(4_000, compute=lambda s, r: paused.get(s, 0.0) if r == 1 else 0.0)
    assert opened(engine, pauses) == []


def test_pauses_of_all_ranks_at_once_are_none():
    job, engine = Job(ranks=4, step_s=STEP_S, noise=0.02), alone("gc_pause")
    pauses = job.steps(3_000, pause=lambda step, _: 1.0 if step % 50 == 49 else 0.0)
    assert opened(engine, pauses) == []


@pytest.mark.parametrize(("period", "pause_s"), [(100, 0.2), (250, 4.0), (50, 20.0)])
def test_a_checkpoint_that_rank_0_writes_alone_is_none(period, pause_s):
    job, engine = Job(ranks=4, step_s=STEP_S, noise=0.02), alone("gc_pause")
    written = job.steps(
        1_500,
        compute=lambda s, r: pause_s if r == 0 and s % period == period - 1 else 0.0,
    )
    assert opened(engine, written) == []


def test_what_rank_0_logs_on_round_steps_is_none():
    job, engine = Job(ranks=4, step_s=STEP_S, noise=0.02), alone("gc_pause")
    logged = job.steps(2_000, compute=lambda s, r: 0.1 if r == 0 and s % 50 == 0 else 0.0)
    assert opened(engine, logged) == []


def test_regular_pauses_that_stopped_are_over():
    job, engine = Job(ranks=4, step_s=STEP_S, noise=0.01), alone("gc_pause")
    opened(engine, job.steps(300))
    opened(engine, job.steps(200, compute=regular(30, 1, 0.1)))
    assert [a.rank for a in engine.active] == [1]
    assert opened(engine, job.steps(150)) == []
    assert not engine.active


def test_reported_pauses_of_one_rank_that_cost_more_than_a_percent_name_it():
    job, engine = Job(ranks=4, step_s=0.04, noise=0.2), alone("gc_pause")
    opened(engine, job.steps(300))
    found = opened(engine, with_events(job, 500, regular(30, 2, 0.05)))
    assert [(a.kind, a.rank) for a in found] == [("gc_pause", 2)]
    assert engine.active[0].value == pytest.approx(0.03, rel=0.4)
    assert "garbage collection stops rank 2 for 50 ms" in found[0].summary
    assert abs((found[0].begin_step or 0) - 305) <= 30


def test_reported_pauses_of_all_ranks_are_one_anomaly_of_the_job():
    job, engine = Job(ranks=4, step_s=0.04, noise=0.2), alone("gc_pause")
    opened(engine, job.steps(300))
    pauses = with_events(job, 500, lambda step, _: 0.05 if step % 30 == 5 else 0.0)
    assert [(a.kind, a.rank) for a in opened(engine, pauses)] == [("gc_pause", None)]
    assert "each of 4 ranks" in engine.active[0].summary


def test_reported_pauses_of_a_job_with_one_rank_count():
    job, engine = Job(ranks=1, step_s=0.1, noise=0.05), alone("gc_pause")
    opened(engine, job.steps(100))
    found = opened(engine, with_events(job, 400, regular(25, 0, 0.1)))
    assert [(a.kind, a.rank) for a in found] == [("gc_pause", 0)]


@pytest.mark.parametrize(
    ("period", "pause_s"),
    [pytest.param(100, 0.03, id="cheap"), pytest.param(1_000, 5.0, id="rare")],
)
def test_reported_pauses_that_are_cheap_or_rare_are_none(period, pause_s):
    job, engine = Job(ranks=2, step_s=0.1, noise=0.05), alone("gc_pause")
    assert opened(engine, with_events(job, 3_000, regular(period, 1, pause_s))) == []


def test_a_burst_of_reported_pauses_that_costs_little_over_a_minute_is_none():
    job, engine = Job(ranks=2, step_s=0.1, noise=0.05), alone("gc_pause")
    opened(engine, job.steps(1_000))
    burst = with_events(job, 10, lambda step, rank: 0.02 if rank == 0 else 0.0)
    assert opened(engine, burst) == []


def test_reported_pauses_that_stopped_are_over_after_a_while():
    job, engine = Job(ranks=2, step_s=0.1, noise=0.05), alone("gc_pause")
    opened(engine, job.steps(300))
    opened(engine, with_events(job, 500, regular(25, 0, 0.1)))
    assert len(engine.active) == 1
    opened(engine, job.steps(2_500))
    assert not engine.active


def test_what_the_shim_says_is_believed_over_the_step_times():
    """Cheap collections are known: regular slow steps of that rank must have another cause."""
    job, engine = Job(ranks=4, step_s=STEP_S, noise=0.01), alone("gc_pause")
    opened(engine, job.steps(300))
    assert opened(engine, with_events(job, 200, regular(20, 1, 0.012))) == []
    for record in job.steps(300, compute=regular(30, 1, 0.1)):
        engine.feed(record)
        if record.rank == 1 and record.step % 20 == 0:
            detail = {"duration_s": 0.012, "generation": 2, "step": record.step}
            engine.feed(RankEvent(record.time, record.job, 1, "gc_pause", detail))
    assert not engine.active
