"""The detectors of steps on jobs whose truth is known."""

import math
import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cases import cases
from tests.detection.streams import Extra, Job, alone, detection, lived, opened

ALWAYS = ((0, 10**9),)
# One rank, whose communication is noisy as well.
ALONE = "1 1 0.01 0.01"


def job(text: str) -> Job:
    ranks, *shape = text.split()
    return Job(int(ranks), *map(float, shape))


def bursts(rank: int, share: float, wait_s: float, seed: int = 5, begin: int = 0) -> Extra:
    """Extras of ``rank`` in a share of its steps, of very different length."""
    chance = random.Random(seed)
    waits = [
        wait_s * chance.gammavariate(2.0, 0.5) if chance.random() < share else 0.0
        for _ in range(3_000)
    ]
    return lambda step, number: waits[step] if number == rank and step >= begin else 0.0


def in_steps(rank: int, extra_s: float, steps: list[int]) -> Extra:
    return lambda step, own: extra_s if own == rank and step in steps else 0.0


def in_a_third(rank: int, extra_s: float, begin: int, end: int) -> Extra:
    third = [step for step in range(begin, end) if random.Random(step).random() < 0.35]
    return in_steps(rank, extra_s, third)


def every(period: int, extra_s: float, at: int = 0, begin: int = 0) -> Extra:
    return lambda step, _: extra_s * (step % period == at and step >= begin)


def rank_after_rank(period: int, extra_s: float) -> Extra:
    return lambda step, rank: extra_s * (step % period == rank)


def lone_pauses(ranks: int, share: float) -> Extra:
    chance = random.Random(3)
    paused = {s: chance.randrange(ranks) for s in range(3_000) if chance.random() < share}
    return lambda step, rank: 0.15 if paused.get(step) == rank else 0.0


def ramp(begin: int, length: int, rise_s: float, end: int = 10**9) -> Extra:
    return lambda step, _: rise_s * min(max((step - begin) / length, 0.0), 1.0) * (step < end)


def since(begin: int, extra_s: float, end: int = 10**9) -> Extra:
    return lambda step, _: extra_s if begin <= step < end else 0.0


def at_random(share: float, extra_s: float, spans: Iterable[tuple[int, int]] = ALWAYS) -> Extra:
    chance = random.Random(3)

    def extra(step: int, _: int) -> float:
        drawn = chance.random() < share
        return extra_s * (drawn and any(begin <= step < end for begin, end in spans))

    return extra


def wandering(least_s: float) -> Extra:
    return lambda step, _: least_s + 0.2 * math.expm1(0.15 * math.sin(step / 400))


def lengths(spread: float, more_from: int = 10**9) -> Extra:
    """Tokens of a step: uneven, and twice as many from some step on."""
    chance = random.Random(5)
    drawn = [1000 * math.exp(spread * chance.gauss(0, 1)) for _ in range(1_500)]
    return lambda step, _: drawn[step] * (1 + (step >= more_from))


def for_lengths(spread: float, more_from: int = 10**9) -> Extra:
    """The computing time beyond that of 1,000 tokens."""
    tokens = lengths(spread, more_from)
    return lambda step, rank: 0.8 * (tokens(step, rank) / 1000 - 1)


# The forms that extras of a story may have.
FORMS: dict[str, Callable[..., Extra]] = {
    form.__name__: form
    for form in (
        *(bursts, in_steps, in_a_third, every, rank_after_rank, lone_pauses, ramp, since),
        *(at_random, wandering, lengths, for_lengths),
    )
}


def together(forms: list[dict[str, dict[str, Any]]]) -> Extra:
    """Return the sum of extras, each a form and its values."""
    extras = [FORMS[name](**values) for form in forms for name, values in form.items()]
    return lambda step, rank: sum(extra(step, rank) for extra in extras)


STORIES = cases(__file__)


@pytest.mark.parametrize("name", STORIES)
def test_what_is_found_and_over_is_what_happened(name, golden_report):
    story = STORIES[name]
    engine = alone(*story["kinds"].split()) if "kinds" in story else detection()
    extras = {phase: together(forms) for phase, forms in story.get("extras", {}).items()}
    lived(job(story["job"]), engine, story["story"], **extras)
    golden_report(engine)


@pytest.mark.parametrize(
    ("kind", "extra", "noisy"),
    [
        ("straggler", {"compute": lambda s, r: 0.06 if r == 1 and s // 20 % 3 == 0 else 0.0}, 500),
        ("data_stall", {"wait": lambda s, r: 0.05 if r == 1 and s // 10 % 4 == 0 else 0.0}, 400),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_noise_of_one_rank_that_its_peers_do_not_share_hides_no_fault_of_it(
    kind, extra, noisy, ranks
):
    steps, engine = Job(ranks, 0.1, 0.02), detection() if kind == "straggler" else alone(kind)
    opened(engine, [*steps.steps(noisy, **extra), *steps.steps(250)])
    phase = "compute 1 0.04" if kind == "straggler" else "wait 1 0.03"
    lived(steps, engine, f"50; 300 {phase} -> {kind} 1")


@pytest.mark.parametrize(
    ("seed", "share", "wait_s", "begin"),
    [(2, 0.03, 0.2, 230), (4, 0.03, 0.2, 220), (8, 0.01, 0.3, 210)],
)
def test_a_stall_that_starts_after_few_and_noisy_blocks_is_found(seed, share, wait_s, begin):
    chance = random.Random(seed * 1000 + begin)
    noise = [wait_s * chance.random() if chance.random() < share else 0.0 for _ in range(begin)]
    story = f"{begin + 150} -> data_stall job"
    wait = {"wait": lambda step, rank: noise[step] if step < begin else 0.4}
    lived(Job(1, 0.0205, 0.02), alone("data_stall"), story, **wait)


@pytest.mark.parametrize(("step_s", "noise"), [(0.02, 0.3), (0.04, 0.2), (0.5, 0.01)])
def test_6000_healthy_steps_with_noise_raise_nothing(step_s, noise):
    lived(Job(2, step_s, noise), detection(), "6000")


@pytest.mark.parametrize(
    ("fault", "kind", "rank", "says"),
    [
        ("compute all 0.024", "step_regression", None, "longer since step"),
        ("compute 1 0.025", "straggler", 1, "longer than its peer since step"),
        ("wait all 0.06", "data_stall", None, "2 ranks wait for data"),
        ("tell 1 0.05 every 30 at 5", "gc_pause", 1, "garbage collection stops rank 1 for 50 ms"),
    ],
)
def test_a_fault_in_short_noisy_steps_is_found_within_15_seconds_and_says_since_when(
    fault, kind, rank, says
):
    steps, engine = Job(2, 0.04, 0.2), detection()
    lived(steps, engine, "500")
    begin = steps.time
    story = f"400 {fault} -> {kind} {'job' if rank is None else rank}"
    (found,) = lived(steps, engine, story)
    assert (found.job, found.severity) == ("llama", "warning")
    assert found.device == (None if rank is None else f"GPU-{rank}")
    assert found.time - begin < 15
    assert abs((found.begin_step or 0) - 500) <= 50
    assert says in found.summary
    if kind == "step_regression":
        assert (found.value or 0) / (found.baseline or 1) == pytest.approx(1.6, abs=0.3)
    if kind == "data_stall":
        assert found.baseline == pytest.approx(0.01, abs=0.005)


@pytest.mark.parametrize("period", [7, 20, 41, 60])
def test_a_rank_that_pauses_at_equal_gaps_is_named_within_five_periods(period):
    # Those of rank 0 may be its logging, but only at round steps.
    rank = 3 * (period % 2)
    story = f"500; {5 * period} compute {rank} 0.15 every {period} at 5 -> gc_pause {rank}"
    (found,) = lived(Job(8, 0.2, 0.01), alone("gc_pause"), story)
    assert f"every {period} steps" in found.summary
    assert found.value == pytest.approx(0.15 / (period * 0.2), rel=0.4)
    assert abs((found.begin_step or 0) - 500) <= period


def test_a_job_that_got_faster_is_not_reported_but_remembered():
    steps, engine = Job(2, 0.5, 0.02), detection()
    lived(steps, engine, "300")
    steps.step_s = 0.3
    lived(steps, engine, "300")
    steps.step_s = 0.5
    lived(steps, engine, "60 -> step_regression job")


def test_a_second_rise_on_top_of_the_first_is_another_anomaly():
    engine = alone("step_regression")
    rises = job(ALONE).steps(1200, compute=lambda n, _: 0.2 * (n >= 500) + 0.2 * (n >= 900))
    first, second = opened(engine, rises)
    assert first.id != second.id
    assert second.baseline == pytest.approx(1.11, abs=0.02)


def test_a_status_says_why_nothing_was_found():
    steps, engine = job(ALONE), alone("step_regression")
    # The job goes on from a checkpoint.
    steps.step = 5000
    lived(steps, engine, "60")
    assert [status.answer for status in engine.statuses()["step_regression"]] == ["learning"]
    lived(steps, engine, "600")
    (status,) = engine.statuses()["step_regression"]
    assert (status.answer, "limit" in status.text) == ("fine", True)
    assert 0 < (status.nearest or 0) < 1
    assert 5000 < (status.nearest_step or 0) < 5660


def test_steps_without_phases_wait_for_nothing():
    engine = alone("data_stall", "straggler", "gc_pause")
    steps = Job(1, 0.5, 0.02).steps(1_000, compute=bursts(0, 0.3, 0.4))
    assert opened(engine, (replace(step, phases_s={}) for step in steps)) == []
