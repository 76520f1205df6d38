"""straggler on streams whose truth is known."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from tests.detection.jobs import joined
from tests.detection.streams import EPOCH_S, Job, alone, detection, opened
from warpwatch_detection.detectors.straggler import Straggler
from warpwatch_detection.signals.peers import stages
from warpwatch_telemetry.log import Decoder, encode_line
from warpwatch_telemetry.records import RankSeen, Step


def test_declared_checkpoints_and_evaluations_are_no_slow_rank():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    opened(engine, job.steps(500))
    for step in job.steps(200):
        extra = "checkpoint" if step.rank == 0 else "comm"
        phases = {**step.phases_s, extra: step.phases_s.get(extra, 0.0) + 0.3}
        assert engine.feed(replace(step, duration_s=step.duration_s + 0.3, phases_s=phases)) == []


def uneven(
    count: int,
    time_s: Callable[[int, int], float],
    tokens: Callable[[int, int], int] | None = None,
    ranks: int = 8,
    first: int = 0,
) -> Iterator[Step]:
    """Steps of a synchronous job where ``time_s`` (step, rank) is what a rank computes."""
    for step in range(first, first + count):
        computes = [time_s(step, rank) for rank in range(ranks)]
        duration = max(computes) + 0.05
        for rank, compute_s in enumerate(computes):
            yield Step(
                EPOCH_S + step,
                "llama",
                rank,
                step,
                duration,
                phases_s={"comm": duration - compute_s},
                tokens=tokens(step, rank) if tokens else 0,
            )


def drawn(sigma: float, seed: int) -> Callable[[int, int], float]:
    """A factor for each step and rank, the same whenever it is asked for."""
    return lambda step, rank: random.Random(f"{seed} {step} {rank}").lognormvariate(0.0, sigma)


def test_a_rank_that_slows_by_10_percent_over_300_steps_is_found_within_400():
    noise = drawn(0.01, 1)
    engine = alone("straggler")

    def time_s(step: int, rank: int) -> float:
        slower = min(max(step - 800, 0) / 300, 1.0) * 0.10 if rank == 5 else 0.0
        return 0.4 * noise(step, rank) * (1 + slower)

    assert opened(engine, uneven(800, time_s)) == []
    found = opened(engine, uneven(400, time_s, first=800))
    assert [(a.kind, a.rank) for a in found] == [("straggler", 5)]
    assert 800 <= (found[0].begin_step or 0) <= 1100
    assert found[0].baseline == pytest.approx(0.4, rel=0.02)


def test_ranks_that_wander_by_two_percent_and_one_that_always_does_more_are_none():
    noise, walk = drawn(0.01, 2), random.Random(2)
    wander = [[walk.uniform(-0.02, 0.02) for _ in range(8)] for _ in range(10)]
    more = [1.0] * 7 + [1.15]
    engine = alone("straggler")
    steps = uneven(2_000, lambda s, r: 0.4 * noise(s, r) * (1 + wander[s // 200][r]) * more[r])
    assert opened(engine, steps) == []


def test_lengths_that_make_now_one_rank_slow_and_now_another_are_none():
    lengths, engine = drawn(0.3, 3), alone("straggler")
    assert opened(engine, uneven(1_500, lambda s, r: 0.4 * lengths(s, r))) == []


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_long_sequences_among_short_ones_are_explained_by_their_tokens(ranks: int) -> None:
    noise, engine = drawn(0.05, 6), detection()

    def tokens(step: int, rank: int) -> int:
        drawn = random.Random(f"{step} {rank}")
        return drawn.randint(2000, 4000) if drawn.random() < 0.3 else drawn.randint(500, 1000)

    def time_s(step: int, rank: int) -> float:
        return 5e-5 * tokens(step, rank) * noise(step, rank)

    assert opened(engine, uneven(1_000, time_s, tokens, ranks)) == []


def test_a_slow_rank_among_uneven_lengths_is_found_by_its_tokens():
    lengths, noise, engine = drawn(0.3, 4), drawn(0.01, 5), alone("straggler")

    def tokens(step: int, rank: int) -> int:
        return int(8192 * lengths(step, rank))

    def time_s(step: int, rank: int) -> float:
        slower = 1.15 if rank == 6 and step >= 600 else 1.0
        return (0.05 + 0.35 * lengths(step, rank)) * noise(step, rank) * slower

    assert opened(engine, uneven(600, time_s, tokens)) == []
    found = opened(engine, uneven(60, time_s, tokens, first=600))
    assert [(a.kind, a.rank) for a in found] == [("straggler", 6)]


def test_a_rank_that_gets_longer_sequences_from_now_on_is_explained_by_its_tokens():
    lengths, noise, engine = drawn(0.05, 6), drawn(0.01, 7), alone("straggler")

    def work(step: int, rank: int) -> float:
        return lengths(step, rank) * (1.5 if rank == 2 and step >= 500 else 1.0)

    steps = uneven(
        1_000,
        lambda s, r: 0.4 * work(s, r) * noise(s, r),
        lambda s, r: int(8192 * work(s, r)),
    )
    assert opened(engine, steps) == []


def in_stages(step: int, rank: int) -> float:
    return 0.6 if rank >= 4 else 0.4


def test_stages_of_a_pipeline_differ_from_the_start_and_are_none():
    noise, engine = drawn(0.01, 8), alone("straggler")
    assert opened(engine, uneven(1_000, lambda s, r: in_stages(s, r) * noise(s, r))) == []


def test_longer_sequences_that_cost_one_stage_more_are_none():
    noise, engine = drawn(0.01, 9), alone("straggler")
    longer = {0.4: 1.2, 0.6: 1.7}

    def time_s(step: int, rank: int) -> float:
        usual = in_stages(step, rank)
        return usual * noise(step, rank) * (longer[usual] if step >= 500 else 1.0)

    assert opened(engine, uneven(1_000, time_s)) == []


def test_a_slow_rank_of_a_fast_stage_is_named_among_the_peers_of_its_stage():
    noise, engine = drawn(0.01, 10), alone("straggler")

    def time_s(step: int, rank: int) -> float:
        slower = 1.2 if rank == 1 and step >= 500 else 1.0
        return in_stages(step, rank) * noise(step, rank) * slower

    found = opened(engine, uneven(540, time_s))
    assert [(a.kind, a.rank) for a in found] == [("straggler", 1)]
    assert "its 3 peers" in found[0].summary
    assert found[0].value == pytest.approx(0.48, rel=0.05)


def placed(ranks: int, stages: int) -> Iterator[RankSeen]:
    """Ranks of a pipeline with the stages one after the other, as the telemetry log has them."""
    for rank in range(ranks):
        seen = RankSeen(
            EPOCH_S, "llama", rank, ranks, parallel={"pipeline": (rank * stages // ranks, stages)}
        )
        line = encode_line(seen)
        assert line is not None
        read = Decoder().decode_line(line)
        assert isinstance(read, RankSeen)
        yield read


def test_a_stage_that_gets_slower_as_a_whole_is_no_straggler_where_stages_are_known():
    def time_s(step: int, rank: int) -> float:
        return 0.4 * noise(step, rank) * (1.3 if rank < 2 and step >= 500 else 1.0)

    for known, found in ((True, []), (False, ["straggler"])):
        noise, engine = drawn(0.01, 12), alone("straggler")
        opened(engine, placed(8, 4) if known else ())
        assert [a.kind for a in opened(engine, uneven(1_000, time_s))] == found


@pytest.mark.parametrize("begin", [0, 500])
def test_a_slow_rank_of_a_known_stage_is_named_also_from_the_start(begin: int) -> None:
    noise, engine = drawn(0.01, 13), alone("straggler")

    def time_s(step: int, rank: int) -> float:
        slower = 1.4 if rank == 1 and step >= begin else 1.0
        return (0.6 if rank > 2 else 0.4) * noise(step, rank) * slower

    opened(engine, placed(6, 2))
    found = opened(engine, uneven(700, time_s, ranks=6))
    assert [(a.kind, a.rank) for a in found] == [("straggler", 1)]
    assert "its 2 peers" in found[0].summary


def test_a_job_with_one_rank_a_stage_is_not_compared_and_says_so():
    noise, engine = drawn(0.01, 14), alone("straggler")
    opened(engine, placed(4, 4))
    slower = uneven(
        1_000, lambda s, r: (0.6 if r == 2 and s >= 500 else 0.4) * noise(s, r), ranks=4
    )
    assert opened(engine, slower) == []
    (sight,) = engine.sights()
    assert sight.blind and sight.text.startswith("ranks 0, 1, 2, 3 of a job in stages")


def test_ranks_with_the_same_experts_are_alike_only_where_each_has_such_a_like():
    both = {rank: {"expert": (rank % 2, 2)} for rank in range(4)}
    assert stages(both) == {0: 0, 1: 1, 2: 0, 3: 1}
    assert stages({rank: {"expert": (rank, 4)} for rank in range(4)}) == {}
    assert stages({rank: {"data": (rank, 4), "tensor": (0, 1)} for rank in range(4)}) == {}
    assert stages({0: {"pipeline": (0, 2)}, 1: {"pipeline": (1, 2)}}) == {0: -1, 1: -1}


def test_two_ranks_that_always_differ_may_be_two_stages():
    noise, engine = drawn(0.01, 11), alone("straggler")
    times = uneven(1_000, lambda s, r: (0.4 + 0.3 * r) * noise(s, r), ranks=2)
    assert opened(engine, times) == []


def test_lengths_that_become_uneven_on_all_ranks_are_none():
    even, uneven_lengths, engine = drawn(0.02, 13), drawn(0.3, 14), alone("straggler")
    steps = uneven(
        1_500, lambda s, r: 0.4 * (uneven_lengths(s, r) if s >= 600 else even(s, r)), ranks=4
    )
    assert opened(engine, steps) == []


def test_a_job_that_begins_again_has_no_straggler_until_it_is_known_again():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), alone("straggler")
    opened(engine, job.steps(300))
    opened(engine, job.steps(60, compute=lambda _, r: 0.15 if r == 1 else 0))
    assert len(engine.active) == 1
    job.step = 0
    assert opened(engine, job.steps(100)) == []
    assert not engine.active


def test_steps_that_lack_a_rank_are_judged_without_it():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), alone("straggler")
    opened(engine, job.steps(300))

    def lossy() -> Iterator[Step]:
        for step in job.steps(400, compute=lambda s, r: 0.15 if r == 1 and s >= 330 else 0):
            if not (step.rank == 3 and step.step % 2):
                yield step

    found = opened(engine, lossy())
    assert [(a.kind, a.rank) for a in found] == [("straggler", 1)]


def test_a_job_with_one_rank_has_nothing_to_compare_with():
    detector = Straggler()
    for step in joined(Job(ranks=1).steps(300)):
        assert not detector.observe(step)
    assert [status.answer for status in detector.statuses()] == ["learning"]


def test_a_detector_whose_limit_is_above_what_it_is_to_find_says_that_it_is_blind() -> None:
    quiet, noisy = Job(ranks=2, step_s=0.1, noise=0.02), Job(ranks=2, step_s=0.1, noise=0.6)
    for job, blind in ((quiet, False), (noisy, True)):
        engine = detection()
        opened(engine, job.steps(1000))
        sights = {sight.kind: sight for sight in engine.sights()}
        assert (sights["straggler"].blind, sights["step_regression"].blind) == (blind, blind)
        assert ("blind to 20%" in sights["straggler"].text) is blind
