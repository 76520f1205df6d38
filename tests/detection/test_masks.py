"""Steps that are no one's fault: under a profiler, and those that still pay for it."""

from __future__ import annotations

from msgspec.structs import replace

from tests.detection.jobs import joined
from tests.detection.streams import EPOCH_S, Job, detection, opened
from warpwatch_detection.job_steps import STEPS_AFTER_CAPTURE
from warpwatch_telemetry.records import RankEvent, Step


def step(number: int, rank: int = 0, profiled: bool = False) -> Step:
    return Step(EPOCH_S + number, "llama", rank, number, 1.0, profiled=profiled)


def test_a_profiled_step_and_twenty_after_it_are_left_out_without_any_event():
    records = [step(number, profiled=number in (3, 4)) for number in range(30)]
    seen = [one.step for one in joined(records)]
    assert seen == [0, 1, 2, 25, 26, 27, 28, 29]


def test_a_step_that_one_rank_profiles_is_masked_for_all():
    records = [step(n, rank, profiled=n == 1 and rank == 1) for n in range(30) for rank in (0, 1)]
    seen = [one.step for one in joined(records)]
    assert seen == [0, 22, 23, 24, 25, 26, 27, 28, 29]


def test_masked_steps_leave_no_gap_in_the_index():
    records = [step(number, profiled=number == 1) for number in range(24)]
    seen = [one.index for one in joined(records)]
    assert seen == [0, 1, 2]


def test_slow_steps_after_a_capture_raise_nothing():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(500))
    profiled = [replace(each, profiled=True) for each in job.steps(5, compute=lambda *_: 0.5)]
    assert opened(engine, profiled) == []
    after = job.steps(STEPS_AFTER_CAPTURE, compute=lambda *_: 0.3)
    assert opened(engine, after) == []
    assert opened(engine, job.steps(100)) == []


def test_a_capture_of_one_rank_masks_until_its_end_is_reported():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(500))
    engine.feed(RankEvent(job.time, "llama", 1, "capture_armed"))
    assert opened(engine, job.steps(60, compute=lambda *_: 0.3)) == []
    engine.feed(RankEvent(job.time, "llama", 1, "capture_finished"))
    assert opened(engine, job.steps(STEPS_AFTER_CAPTURE, compute=lambda *_: 0.3)) == []
    assert opened(engine, job.steps(100)) == []
