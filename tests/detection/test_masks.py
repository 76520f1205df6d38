"""Steps that are no one's fault: under a profiler, and those that still pay for it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.detection.jobs import joined
from tests.detection.streams import EPOCH_S, Job, detection, opened
from warpwatch_detection.job_steps import STEPS_AFTER_CAPTURE
from warpwatch_telemetry.records import RankEvent, Step


def step(number: int, rank: int = 0, profiled: bool = False) -> Step:
    return Step(EPOCH_S + number, "llama", rank, number, 1.0, profiled=profiled)


@pytest.mark.parametrize(
    ("profiled", "ranks", "judged"),
    [
        pytest.param({(3, 0), (4, 0)}, 1, [0, 1, 2, *range(25, 30)], id="and twenty after it"),
        pytest.param({(1, 1)}, 2, [0, *range(22, 30)], id="of one rank for all"),
    ],
)
def test_a_profiled_step_is_left_out_without_any_event_or_gap_in_the_index(
    profiled: set[tuple[int, int]], ranks: int, judged: list[int]
) -> None:
    records = [step(n, rank, (n, rank) in profiled) for n in range(30) for rank in range(ranks)]
    seen = joined(records)
    assert [one.step for one in seen] == judged
    assert [one.index for one in seen] == list(range(len(judged)))


def test_slow_steps_after_a_capture_raise_nothing():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(300))
    profiled = [replace(each, profiled=True) for each in job.steps(5, compute=lambda *_: 0.5)]
    assert opened(engine, profiled) == []
    after = job.steps(STEPS_AFTER_CAPTURE, compute=lambda *_: 0.3)
    assert opened(engine, after) == []
    assert opened(engine, job.steps(100)) == []


def test_a_capture_of_one_rank_masks_until_its_end_is_reported():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(300))
    engine.feed(RankEvent(job.time, "llama", 1, "capture_armed"))
    assert opened(engine, job.steps(60, compute=lambda *_: 0.3)) == []
    engine.feed(RankEvent(job.time, "llama", 1, "capture_finished"))
    assert opened(engine, job.steps(STEPS_AFTER_CAPTURE, compute=lambda *_: 0.3)) == []
    assert opened(engine, job.steps(100)) == []
