"""data_stall on streams whose truth is known."""

from __future__ import annotations

import random

import msgspec
import pytest
from msgspec.structs import replace

from tests.detection.alone import alone
from tests.detection.jobs import joined
from tests.detection.streams import Extra, Job, detection, opened
from warpwatch_detection.detectors.data_stall import DataStall
from warpwatch_detection.job_steps import JobSteps


def test_input_that_doubles_the_step_is_a_data_stall_within_15_seconds():
    job, engine = Job(step_s=0.04, noise=0.2), detection()
    assert opened(engine, job.steps(500)) == []
    begin, first = job.time, job.step
    found = opened(engine, job.steps(400, wait=lambda *_: 0.06))
    assert [(a.kind, a.job, a.rank, a.severity) for a in found] == [
        ("data_stall", "llama", None, "warning")
    ]
    assert found[0].time - begin < 15
    assert abs((found[0].begin_step or 0) - first) <= 25
    assert found[0].baseline == pytest.approx(0.01, abs=0.005)
    assert "2 ranks wait for data" in found[0].summary


def test_input_that_stalls_one_rank_names_it():
    job, engine = Job(ranks=8, step_s=0.2, noise=0.02), detection()
    assert opened(engine, job.steps(500)) == []
    found = opened(engine, job.steps(200, wait=lambda _, rank: 0.1 if rank == 5 else 0.0))
    assert [(a.kind, a.rank) for a in found] == [("data_stall", 5)]


def test_input_that_was_slow_from_the_first_step_is_found_too():
    job, engine = Job(step_s=0.04, noise=0.1), detection()
    found = opened(engine, job.steps(300, wait=lambda *_: 0.06))
    assert [(a.kind, a.baseline) for a in found] == [("data_stall", None)]
    assert "from the start" in found[0].summary


def bursts(rank: int, share: float, wait_s: float, seed: int = 5) -> Extra:
    """Waits of ``rank`` in a share of its steps, of very different length."""
    chance = random.Random(seed)
    waits = [
        wait_s * chance.gammavariate(2.0, 0.5) if chance.random() < share else 0.0
        for _ in range(10_000)
    ]
    return lambda step, number: waits[step] if number == rank else 0.0


@pytest.mark.parametrize("seed", [5, 6, 7])
def test_a_rank_that_waits_long_in_a_third_of_its_steps_is_named_within_80(seed):
    job, engine = Job(ranks=8, step_s=0.5, noise=0.02), alone("data_stall")
    assert opened(engine, job.steps(500)) == []
    found = opened(engine, job.steps(80, wait=bursts(2, 0.3, 0.4, seed)))
    assert [(a.kind, a.rank) for a in found] == [("data_stall", 2)]


def test_lone_slow_batches_of_single_ranks_are_none():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), alone("data_stall")
    slow = [bursts(rank, 1 / 150, 1.0, seed=rank) for rank in range(4)]
    batches = job.steps(4_000, wait=lambda s, r: slow[r](s, r))
    assert opened(engine, batches) == []


def test_ranks_that_wait_for_the_stalled_one_have_no_anomaly_of_theirs():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), alone("data_stall", "straggler", "gc_pause")
    opened(engine, job.steps(400))
    found = opened(engine, job.steps(300, wait=bursts(1, 0.4, 0.5)))
    assert [(a.kind, a.rank) for a in found] == [("data_stall", 1)]


def test_all_ranks_that_stall_are_one_anomaly_of_the_job():
    job, engine = Job(ranks=8, step_s=0.5, noise=0.02), alone("data_stall")
    opened(engine, job.steps(400))
    found = opened(engine, job.steps(100, wait=lambda *_: 0.1))
    assert [(a.kind, a.rank) for a in found] == [("data_stall", None)]
    assert "8 ranks wait" in found[0].summary


def test_one_rank_that_waits_from_the_first_step_is_named():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), alone("data_stall")
    found = opened(engine, job.steps(120, wait=lambda _, r: 0.4 if r == 3 else 0.0))
    assert [(a.kind, a.rank, a.begin_step) for a in found] == [("data_stall", 3, 0)]


def test_waits_that_were_always_there_are_the_jobs_way():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), alone("data_stall")
    usual = job.steps(2_000, wait=lambda step, _: 0.3 if step % 8 == 0 else 0.02)
    assert opened(engine, usual) == []


def test_a_stall_that_went_away_is_over():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), alone("data_stall")
    opened(engine, job.steps(400))
    opened(engine, job.steps(100, wait=lambda *_: 0.2))
    assert len(engine.active) == 1
    assert opened(engine, job.steps(120)) == []
    assert not engine.active


def test_input_that_got_better_and_worse_again_is_a_stall():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), alone("data_stall")
    assert opened(engine, job.steps(500, wait=lambda *_: 0.1)) == []
    assert opened(engine, job.steps(500)) == []
    found = opened(engine, job.steps(120, wait=lambda *_: 0.1))
    assert [(a.kind, a.rank) for a in found] == [("data_stall", None)]


def test_steps_without_phases_wait_for_nothing():
    job, engine = Job(ranks=1, step_s=0.5, noise=0.02), alone("data_stall", "straggler", "gc_pause")
    plain = (replace(s, phases_s={}) for s in job.steps(1_000, compute=bursts(0, 0.3, 0.4)))
    assert opened(engine, plain) == []


def test_what_it_remembers_outlives_a_restart_in_the_middle():
    job = Job(ranks=4)
    records = [*job.steps(400), *job.steps(300, wait=lambda _, r: 0.03 if r == 1 else 0.0)]
    steps = joined(records)
    whole, first, second = DataStall(), DataStall(), DataStall()
    for step in steps[:480]:
        whole.observe(step)
        first.observe(step)
    saved = msgspec.msgpack.encode(first.state)
    second.state = msgspec.msgpack.decode(saved, type=type(first.state))
    said = [list(whole.observe(step)) for step in steps[480:]]
    assert [list(second.observe(step)) for step in steps[480:]] == said
    assert any(said)


def test_readings_say_what_was_seen_and_how_near_it_came():
    detector, steps = DataStall(), JobSteps()
    job = Job(ranks=2, step_s=0.5, noise=0.02)
    for step in joined(job.steps(30), steps):
        detector.observe(step)
    assert {status.answer for status in detector.statuses()} == {"learning"}
    for step in joined(job.steps(400, wait=lambda _, r: 0.03 if r else 0.0), steps):
        detector.observe(step)
    second = list(detector.statuses())[1]
    assert (second.answer, second.rank) == ("fine", 1)
    assert second.limit == pytest.approx(0.14, abs=0.05)
    assert second.value == pytest.approx(0.07, abs=0.02)
    assert 0 < (second.nearest or 0) < 1


def test_a_stall_that_begins_while_the_waits_are_learned_is_found():
    job, engine = Job(ranks=3, step_s=0.05, noise=0.02), detection()
    assert opened(engine, job.steps(80)) == []
    found = opened(engine, job.steps(500, wait=lambda _, rank: 0.03 if rank == 2 else 0.0))
    assert [(a.kind, a.rank) for a in found] == [("data_stall", 2)]


def test_waits_of_one_rank_that_its_peers_do_not_share_hide_no_stall_of_it():
    job, engine = Job(ranks=4, step_s=0.1, noise=0.02), alone("data_stall")
    uneven = job.steps(400, wait=lambda s, r: 0.05 if r == 2 and s // 10 % 4 == 0 else 0.0)
    opened(engine, uneven)
    opened(engine, job.steps(300))
    assert list(engine.active) == []
    opened(engine, job.steps(300, wait=lambda _, rank: 0.03 if rank == 2 else 0.0))
    assert [(one.kind, one.rank) for one in engine.active] == [("data_stall", 2)]
