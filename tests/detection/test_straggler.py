"""straggler on ranks that differ: uneven lengths, stages of a pipeline, drifts, lost records."""

import math
import random
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from tests.cases import cases
from tests.detection.streams import EPOCH_S, Job, alone, detection, fed, kinds_of, lived, on, opened
from warpwatch_detection.job_steps import JobSteps
from warpwatch_detection.signals.peers import WorkScaling
from warpwatch_telemetry.log import Decoder, encode_line
from warpwatch_telemetry.records import End, RankSeen, Step

# (step, rank) -> a factor, seconds or tokens.
Of = Callable[[int, int], float]


def uneven(count: int, time_s: Of, tokens: Of | None, ranks: int, first: int) -> Iterator[Step]:
    """Steps of a synchronous job where ``time_s`` (step, rank) is what a rank computes."""
    for step in range(first, first + count):
        computes = [time_s(step, rank) for rank in range(ranks)]
        duration = max(computes) + 0.05
        for rank, compute_s in enumerate(computes):
            phases = {"comm": duration - compute_s}
            counted = int(tokens(step, rank)) if tokens else 0
            now = EPOCH_S + step
            yield Step(now, "llama", rank, step, duration, phases_s=phases, tokens=counted)


def drawn(sigma: float, seed: int) -> Of:
    """A factor for each step and rank, the same whenever it is asked for."""
    source = random.Random(seed)
    values = [source.lognormvariate(0.0, sigma) for _ in range(1_500 * 8)]
    return lambda step, rank: values[8 * step + rank]


def slower(factor: float, rank: int, begin: int = 500) -> Of:
    return lambda step, own: factor if own == rank and step >= begin else 1.0


NOISE, EVEN, LENGTHS, SIMILAR = (drawn(s, n) for n, s in enumerate((0.01, 0.02, 0.3, 0.05)))
WANDER = drawn(0.01, 7)
MORE_WORK = slower(1.5, 2)
LONGER = {0.4: 1.2, 0.6: 1.7}


def mixed_tokens(step: int, rank: int) -> float:
    return (3000 if LENGTHS(step, rank) > 1.2 else 750) * SIMILAR(step, rank)


def in_stages(step: int, rank: int) -> float:
    return 0.6 if rank >= 4 else 0.4


def drifting(step: int, rank: int) -> float:
    return 1 + min(max(step - 800, 0) / 300, 1.0) * 0.10 * (rank == 5)


# Seconds, tokens, ranks, steps without and then with the fault, and the straggler.
STORIES: dict[str, tuple[Of, Of | None, int, int, int, int | None]] = {
    "10 percent slower over 300 steps is found within 400":
        (lambda s, r: 0.4 * NOISE(s, r) * drifting(s, r), None, 8, 800, 400, 5),
    "ranks that wander by two percent and one that always does more": (
        lambda s, r: 0.4 * NOISE(s, r) * WANDER(s // 200, r) * (1.06 if r == 7 else 1.0),
        None, 8, 0, 1_400, None,
    ),
    "lengths that make now one rank slow and now another":
        (lambda s, r: 0.4 * LENGTHS(s, r), None, 8, 0, 1_000, None),
    "lengths that become uneven on all ranks":
        (lambda s, r: 0.4 * (LENGTHS(s, r) if s >= 600 else EVEN(s, r)), None, 4, 600, 800, None),
    "a slow rank among uneven lengths is found by its tokens": (
        lambda s, r: (0.05 + 0.35 * LENGTHS(s, r)) * NOISE(s, r) * slower(1.15, 6, 600)(s, r),
        lambda s, r: 8192 * LENGTHS(s, r), 8, 600, 60, 6,
    ),
    "longer sequences of one rank from now on are explained by its tokens": (
        lambda s, r: 0.4 * SIMILAR(s, r) * MORE_WORK(s, r) * NOISE(s, r),
        lambda s, r: 8192 * SIMILAR(s, r) * MORE_WORK(s, r), 8, 500, 400, None,
    ),
    "longer sequences that cost one stage more": (
        lambda s, r: in_stages(s, r) * NOISE(s, r) * (LONGER[in_stages(s, r)] if s >= 500 else 1),
        None, 8, 500, 400, None,
    ),
    "a slow rank of a fast stage is named":
        (lambda s, r: in_stages(s, r) * NOISE(s, r) * slower(1.2, 1)(s, r), None, 8, 500, 40, 1),
    "two ranks that always differ may be two stages":
        (lambda s, r: (0.4 + 0.3 * r) * NOISE(s, r), None, 2, 0, 800, None),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_a_rank_that_is_slow_is_told_from_one_that_has_more_to_do(name):
    time_s, tokens, ranks, healthy, ill, rank = STORIES[name]
    engine = alone("straggler")
    assert opened(engine, uneven(healthy, time_s, tokens, ranks, 0)) == []
    found = opened(engine, uneven(ill, time_s, tokens, ranks, healthy))
    assert kinds_of(found) == ([] if rank is None else [("straggler", rank)])
    for anomaly in found:
        assert healthy - 25 <= (anomaly.begin_step or 0) <= healthy + 300
        of_stage = name == "a slow rank of a fast stage is named"
        assert f"its {3 if of_stage else 7} peers" in anomaly.summary
        assert of_stage or tokens or anomaly.baseline == pytest.approx(0.4, rel=0.02)


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_long_sequences_among_short_ones_are_explained_by_their_tokens(ranks):
    steps = uneven(700, lambda s, r: 5e-5 * mixed_tokens(s, r) * EVEN(s, r), mixed_tokens, ranks, 0)
    assert opened(detection(), steps) == []


def test_declared_checkpoints_and_evaluations_are_no_slow_rank():
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), detection()
    lived(job, engine, "300")
    for step in job.steps(200):
        extra = "checkpoint" if step.rank == 0 else "comm"
        phases = {**step.phases_s, extra: step.phases_s.get(extra, 0.0) + 0.3}
        assert engine.feed(replace(step, duration_s=step.duration_s + 0.3, phases_s=phases)) == []


def placed(ranks: int, stages: int, **more: Callable[[int], tuple[int, int]]) -> Iterator[RankSeen]:
    """Ranks of a pipeline with the stages one after the other, as the telemetry log has them."""
    for rank in range(ranks):
        place = {"pipeline": (rank * stages // ranks, stages)}
        place |= {kind: of(rank) for kind, of in more.items()}
        line = encode_line(RankSeen(EPOCH_S, "llama", rank, ranks, parallel=place))
        assert line is not None
        read = Decoder().decode_line(line)
        assert isinstance(read, RankSeen)
        yield read


def test_a_stage_that_gets_slower_as_a_whole_is_no_straggler_where_stages_are_known():
    def time_s(step: int, rank: int) -> float:
        return 0.4 * NOISE(step, rank) * (1.3 if rank < 2 and step >= 300 else 1.0)

    for known, found in ((True, []), (False, ["straggler"])):
        engine = alone("straggler")
        opened(engine, placed(8, 4) if known else ())
        assert [a.kind for a in opened(engine, uneven(600, time_s, None, 8, 0))] == found


def copies(ranks: int, of: int = 0) -> list[RankSeen]:
    """Ranks that each have the whole model, or every second one if ``of`` is half of the ranks."""
    places = ({"data": (rank % (of or ranks), of or ranks)} for rank in range(ranks))
    return [RankSeen(EPOCH_S, "llama", n, ranks, parallel=at) for n, at in enumerate(places)]


@pytest.mark.parametrize("ranks", [3, 8, 64])
@pytest.mark.parametrize(("factor", "begin", "known", "severity"), cases(__file__)["early"])
def test_a_rank_that_is_slow_before_anything_is_known_is_found_within_30_steps(
    ranks, factor, begin, known, severity
):
    engine = alone("straggler")
    # Half as many copies as ranks: the program splits the model in a way that it does not report.
    opened(engine, copies(ranks, 0 if known else (ranks + 1) // 2))
    time_s: Of = lambda s, r: 0.4 * NOISE(s, r % 8) * slower(factor, 2, begin)(s, r)  # noqa: E731
    (found,) = opened(engine, uneven(begin + 31, time_s, None, ranks, 0))
    assert (found.rank, found.severity) == (2, severity)
    assert found.baseline == pytest.approx(0.4, rel=0.02)
    assert abs((found.begin_step or 0) - begin) <= 3
    assert ("from the start" in found.summary) is (begin < 30)
    assert ("may have more work" in found.summary) is (severity == "info")
    # A rank that was slow from the start may still get slower.
    worse = uneven(
        60, lambda s, r: 1.5 * time_s(s, r) if r == 2 else time_s(s, r), None, ranks, 131
    )
    assert {anomaly.severity for anomaly in fed(engine, worse)} <= {severity, "warning"}
    assert [anomaly.severity for anomaly in engine.active] == ["warning"]


def test_copies_of_a_model_that_are_reported_late_delay_nothing():
    engine = alone("straggler")
    time_s: Of = lambda s, r: 0.4 * NOISE(s, r) * slower(1.3, 2, 0)(s, r)  # noqa: E731
    assert opened(engine, [*uneven(20, time_s, None, 8, 0), *copies(8)]) == []
    (found,) = opened(engine, uneven(11, time_s, None, 8, 20))
    assert (found.rank, found.severity) == (2, "warning")


def busiest(rank: int) -> Of:
    return lambda step, own: 1.25 if own == rank else 1.0


# The program's reports of its ranks, their differences, and their tokens.
BY_CONSTRUCTION: dict[str, tuple[list[RankSeen], Of, Of | None]] = {
    "embedding and head of a pipeline": (
        [*placed(8, 4)], lambda s, r: {0: 1.15, 3: 1.4}.get(r // 2, 1.0), None),
    "the same where nobody reports stages":
        ([], lambda s, r: {0: 1.15, 3: 1.4}.get(r // 2, 1.0), None),
    "experts of their own": ([*placed(8, 1, expert=lambda r: (r, 8))], busiest(5), None),
    "experts that two ranks have": (
        [*placed(8, 1, expert=lambda r: (r % 4, 4))], lambda s, r: busiest(1)(s, r % 4), None),
    "work that is counted": (copies(8), lambda s, r: 1.25 if r == 5 else 1.0,
                             lambda s, r: 8192 * (1.35 if r == 5 else 1.0)),
    "work of two sizes": (copies(8), lambda s, r: 1 + 0.25 * (r % 2),
                          lambda s, r: 8192 * (1 + 0.35 * (r % 2))),
    "rank 0 logs": (copies(8), lambda s, r: 1 + (r == 0) * (0.08 + 2 * (s % 10 == 0)), None),
    "GPUs that differ by five percent":
        (copies(8), lambda s, r: 1 + 0.05 * (-1.4, 0.3, 1.5, -0.6, 0.1, -0.9, 0.9, 0.2)[r], None),
    "a rank that compiles for longer": (copies(8), lambda s, r: 1 + (r == 3 and s < 12), None),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_CONSTRUCTION)
def test_ranks_that_differ_by_construction_are_no_stragglers(name):
    seen, factor, tokens = BY_CONSTRUCTION[name]
    engine = alone("straggler")
    opened(engine, seen)
    time_s: Of = lambda s, r: 0.4 * NOISE(s, r) * factor(s, r)  # noqa: E731
    assert opened(engine, uneven(400, time_s, tokens, 8, 0)) == []


@pytest.mark.parametrize("begin", [0, 300])
def test_a_slow_rank_of_a_known_stage_is_named_also_from_the_start(begin):
    def time_s(step: int, rank: int) -> float:
        return (0.6 if rank > 2 else 0.4) * NOISE(step, rank) * slower(1.4, 1, begin)(step, rank)

    engine = alone("straggler")
    opened(engine, placed(6, 2))
    (found,) = opened(engine, uneven(500, time_s, None, 6, 0))
    assert (found.kind, found.rank, "its 2 peers" in found.summary) == ("straggler", 1, True)


def test_a_job_with_one_rank_a_stage_is_not_compared_and_says_so():
    engine = alone("straggler")
    opened(engine, placed(9, 9))
    time_s: Of = lambda s, r: (0.6 if r == 2 and s >= 300 else 0.4) * NOISE(s, r % 8)  # noqa: E731
    assert opened(engine, uneven(600, time_s, None, 9, 0)) == []
    (sight,) = engine.sensitivities()
    assert sight.blind and sight.text.startswith("ranks 0, 1, 2, 3, 4, 5, 6, 7 of a job in stages")


def test_a_rank_that_reports_no_place_leaves_that_of_the_job_unknown():
    steps = JobSteps()
    for rank in (0, 1):
        place = {} if rank else {"data": (0, 2)}
        steps.observe(RankSeen(EPOCH_S, "llama", rank, 2, parallel=place))
    found = [steps.observe(Step(EPOCH_S, "llama", rank, 0, 1.0)) for rank in (0, 1)]
    assert [step.alike for step in found if step is not None] == [None]


def test_a_job_that_begins_again_has_no_straggler_until_it_is_known_again():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), alone("straggler")
    lived(job, engine, "300; 60 compute 1 0.15 -> straggler 1")
    job.step = 0
    lived(job, engine, "100")


@pytest.mark.parametrize(
    ("kind", "steps", "fault"),
    [
        ("straggler", 300, {"compute": on(1, 0.15)}),
        ("comm_slow", 1000, {"comm": lambda *_: 0.2}),
    ],
)
def test_what_has_nothing_to_compare_any_more_is_over_after_ten_minutes(kind, steps, fault):
    job, engine = Job(ranks=2, step_s=0.5, noise=0.02), alone(kind)
    assert opened(engine, [*job.seen(), *job.steps(steps)]) == []
    assert [one.kind for one in opened(engine, job.steps(200, **fault))] == [kind]
    engine.feed(End(job.time, "llama", 1))
    left = Job(ranks=1, step_s=0.5)
    left.time, left.step = job.time, job.step
    for seconds, active in ((590, 1), (20, 0)):
        until = left.time + seconds
        while left.time < until:
            (step,) = left.steps(1)
            assert opened(engine, [replace(step, phases_s={})]) == []
        assert len(engine.active) == active


def test_steps_that_lack_a_rank_are_judged_without_it():
    job, engine = Job(ranks=4, step_s=0.5, noise=0.02), alone("straggler")
    lived(job, engine, "330")
    steps = job.steps(370, compute=on(1, 0.15))
    lossy = (step for step in steps if not (step.rank == 3 and step.step % 2))
    assert kinds_of(opened(engine, lossy)) == [("straggler", 1)]


def test_a_job_with_one_rank_has_nothing_to_compare_with():
    engine = alone("straggler")
    lived(Job(ranks=1), engine, "300")
    assert [status.answer for status in engine.statuses()["straggler"]] == ["learning"]


def test_a_detector_whose_limit_is_above_what_it_is_to_find_says_that_it_is_blind():
    for noise, blind in ((0.02, False), (0.6, True)):
        engine = detection()
        opened(engine, Job(ranks=2, step_s=0.1, noise=noise).steps(700))
        sights = {sight.kind: sight for sight in engine.sensitivities()}
        assert (sights["straggler"].blind, sights["step_regression"].blind) == (blind, blind)
        assert ("blind to 20%" in sights["straggler"].text) is blind


@pytest.mark.parametrize("exponent", [0.5, 1.0, 1.5])
def test_the_exponent_of_work_is_learned_as_work_grows_and_as_it_shrinks(exponent):
    scaling, source = WorkScaling(), random.Random(1)
    for _ in range(500):
        work = {rank: source.randrange(100, 3000) for rank in range(4)}
        times = {rank: exponent * math.log(of) + 0.1 * rank for rank, of in work.items()}
        scaling.explained(times, work)
    assert scaling.exponent == pytest.approx(exponent, abs=0.01)
    # A pause of one rank teaches next to nothing, also with twice the work.
    scaling.explained(times | {0: times[0] + 5.0}, work | {0: work[0] + 1})
    assert scaling.exponent == pytest.approx(exponent, abs=0.01)
    scaling.explained(times | {0: times[0] + 50.0}, work | {0: 2 * work[0]})
    assert scaling.exponent == pytest.approx(exponent, abs=0.2)


def test_a_rank_whose_place_is_unknown_stops_no_detector():
    job, engine = Job(ranks=3, step_s=0.5, noise=0.02), alone("straggler")
    opened(engine, [*job.seen(), *job.steps(60)])
    for rank in (0, 2):
        engine.feed(RankSeen(job.time, "llama", rank, 3, parallel={"data": (rank, 3)}))
    assert opened(engine, job.steps(300)) == []
