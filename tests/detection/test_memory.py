"""memory_leak: growth that never ends against growth that does."""

import random
import re
from collections.abc import Callable, Iterator

import pytest

from tests.detection.streams import EPOCH_S, alone, kinds_of, opened
from warpwatch_telemetry.records import RankEvent, RankSeen, Record, Step

MB, GB = 1e6, 1e9
STEP_S = 0.5
# (step, rank) -> bytes on top of 40 GB.
Level = Callable[[int, int], float]


def training(level: Level, first: int = 0, last: int = 1900, ranks: int = 2) -> Iterator[Record]:
    noise = random.Random(first)
    if first == 0:
        for rank in range(ranks):
            yield RankSeen(EPOCH_S, "llama", rank, ranks, f"GPU-{rank}")
    for step in range(first, last):
        for rank in range(ranks):
            used = int(40 * GB + noise.gauss(0, 5 * MB) + level(step, rank))
            yield Step(
                EPOCH_S + step * STEP_S, "llama", rank, step, STEP_S, memory_allocated_bytes=used
            )


def leak_of(rank: int, begin: int, slope: float) -> Level:
    return lambda step, own: slope * max(0, step - begin) if own == rank else 0.0


@pytest.mark.parametrize("slope", [2 * MB, 20 * MB])
def test_memory_that_grows_without_end_is_found_within_1000_steps_with_its_rank(
    slope, golden_report
):
    engine = alone("memory_leak")
    found = opened(engine, training(leak_of(1, 900, slope)))
    golden_report(engine)
    assert kinds_of(found) == [("memory_leak", 1)]
    assert 1200 < (found[0].step or 0) < 1900
    assert found[0].value == pytest.approx(slope, rel=0.2)
    assert abs((found[0].begin_step or 0) - 900) < 150


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(lambda step, _: 20 * MB * min(max(step - 700, 0), 50), id="50 steps"),
        pytest.param(lambda step, _: 20 * MB * min(max(step - 700, 0), 300), id="300 steps"),
        pytest.param(lambda step, _: 5 * GB * (1 - 0.99**step), id="a cache that fills"),
        pytest.param(lambda step, _: 5 * GB * (1 - 0.998**step), id="slowly"),
        pytest.param(lambda step, _: 10 * MB * (step % 200), id="a sawtooth"),
        pytest.param(lambda step, _: 2 * GB * min(step // 150, 4), id="in steps"),
        pytest.param(lambda step, _: 8 * GB if step % 250 < 3 else 0.0, id="evaluations"),
        pytest.param(lambda step, _: 3 * GB * (step > 900), id="once for all"),
        pytest.param(lambda *_: 0.0, id="noise alone"),
    ],
)
def test_growth_that_ends_is_no_leak(level, golden_report):
    engine = alone("memory_leak")
    assert opened(engine, training(level)) == []
    golden_report(engine)


def test_a_long_sawtooth_is_found_in_its_first_tooth_at_most():
    found = opened(alone("memory_leak"), training(lambda s, _: 5 * MB * (s % 900), last=4000))
    assert len(found) <= 1


def test_ranks_that_leak_alike_are_one_anomaly_of_the_job():
    found = opened(alone("memory_leak"), training(lambda s, _: 5 * MB * max(0, s - 900)))
    assert kinds_of(found) == [("memory_leak", None)]
    assert found[0].summary.startswith("ranks 0, 1 allocate 5 MB more each step")


def test_a_leak_of_each_evaluation_is_found_by_the_long_blocks():
    # 40 MB every 400 steps: flat nearly everywhere, but never back.
    records = training(lambda s, rank: 40 * MB * (s // 400) if rank == 1 else 0.0, last=3000)
    assert opened(alone("memory_leak"), records) == []
    records = training(lambda s, rank: 40 * MB * (s // 400) if rank == 1 else 0.0, 0, 14_000)
    assert [a.rank for a in opened(alone("memory_leak"), records)] == [1]


def on_host(
    used: Callable[[int], float], steps: int, step_s: float, left: float, ranks: int = 2
) -> Iterator[Record]:
    """``used``: bytes of each rank by step; ``left``: what there is besides at step 0."""
    noise = random.Random(3)
    for rank in range(ranks):
        yield RankSeen(EPOCH_S, "llama", rank, ranks)
    for step in range(steps):
        now = EPOCH_S + step * step_s
        is_look = step % max(1, round(2 / step_s)) == 0
        grown = ranks * (used(step) - used(0))
        for rank in range(ranks):
            yield Step(now, "llama", rank, step, step_s)
            if is_look:
                said = {
                    "anonymous_bytes": 600 * MB + used(step) + noise.gauss(0, 2 * MB),
                    "available_bytes": max(0.0, left - grown),
                }
                yield RankEvent(now, "llama", rank, "process", said)


@pytest.mark.parametrize(
    ("slope", "begin", "step_s", "left", "share"),
    [
        pytest.param(6 * MB, 0, 0.05, 16 * GB, 0.4, id="6 MB a step from the start"),
        pytest.param(100 * MB, 300, 2.0, 60 * GB, 0.4, id="long steps"),
        pytest.param(25 * MB, 2000, 0.02, 200 * GB, 0.4, id="80 s to exhaustion"),
        pytest.param(0.24 * MB, 2500, 0.01, 60 * GB, 0.1, id="240 kB a step"),
        pytest.param(0.3 * MB, 0, 0.05, 20 * GB, 0.2, id="300 kB a step from the start"),
    ],
)
def test_a_leak_of_host_memory_is_found_long_before_half_of_what_is_left_is_gone(
    slope, begin, step_s, left, share
):
    """Both ranks leak; the last column: the share that is gone at the end."""
    steps = begin + int(share * left / (2 * slope))
    leak = on_host(lambda step: slope * max(0, step - begin), steps, step_s, left)
    (found,) = opened(alone("memory_leak"), leak)
    assert abs((found.begin_step or 0) - begin) <= max(60, 5 / step_s)
    assert found.value == pytest.approx(slope, rel=0.1)


@pytest.mark.parametrize(
    "used",
    [
        pytest.param(lambda step: 2 * MB * min(step, 1500), id="data that are read once"),
        pytest.param(lambda step: 0.6 * MB * min(step, 5000), id="a replay buffer"),
        pytest.param(lambda step: 60 * GB * (1 - 0.997**step) / 4, id="a cache"),
        pytest.param(lambda step: 3 * GB * min(step // 300, 3), id="first epochs"),
        pytest.param(lambda step: 8 * GB * (step > 1500), id="once for all"),
        pytest.param(lambda step: 20 * MB * (step % 120), id="a sawtooth"),
    ],
)
def test_healthy_growth_of_host_memory_is_no_leak(used):
    assert opened(alone("memory_leak"), on_host(used, 6000, 0.05, 128 * GB)) == []


def test_a_leaking_process_is_named_with_when_memory_runs_out(golden_report):
    one = on_host(lambda step: 0.3 * MB * max(0, step - 900), 3000, 0.05, 20 * GB, ranks=1)
    engine = alone("memory_leak")
    (found,) = opened(engine, one)
    golden_report(engine)
    said = r"rank 0 takes (29|30)0 kB more host memory each step since step \d+: out of memory in"
    assert re.fullmatch(rf"{said} about 5\d min", found.summary)
