"""The detectors of steps on jobs whose truth is known."""

import math
import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.cases import cases
from tests.detection.streams import Extra, Job, alone, detection, lived, opened


def job(text: str) -> Job:
    ranks, *shape = text.split()
    return Job(int(ranks), *map(float, shape))


STORIES = cases(__file__)


@pytest.mark.parametrize("name", STORIES)
def test_what_is_found_and_over_is_what_happened(name, golden_report):
    story = STORIES[name]
    engine = alone(*story["kinds"].split()) if "kinds" in story else detection()
    lived(job(story["job"]), engine, story["story"])
    golden_report(engine)


def bursts(rank: int, share: float, wait_s: float, seed: int = 5) -> Extra:
    """Extras of ``rank`` in a share of its steps, of very different length."""
    chance = random.Random(seed)
    waits = [
        wait_s * chance.gammavariate(2.0, 0.5) if chance.random() < share else 0.0
        for _ in range(3_000)
    ]
    return lambda step, number: waits[step] if number == rank else 0.0


def from_step(begin: int, extra: Extra) -> Extra:
    return lambda step, rank: extra(step, rank) if step >= begin else 0.0


def in_steps(rank: int, extra_s: float, *steps: int) -> Extra:
    return lambda step, own: extra_s if own == rank and step in steps else 0.0


def lone_pauses(ranks: int, share: float) -> Extra:
    chance = random.Random(3)
    paused = {s: chance.randrange(ranks) for s in range(3_000) if chance.random() < share}
    return lambda step, rank: 0.15 if paused.get(step) == rank else 0.0


def each_rank(*extras: Extra) -> Extra:
    return lambda step, rank: extras[rank](step, rank)


def ramp(begin: int, length: int, rise_s: float, end: int = 10**9) -> Extra:
    return lambda step, _: rise_s * min(max((step - begin) / length, 0.0), 1.0) * (step < end)


def since(begin: int, extra_s: float, end: int = 10**9) -> Extra:
    return lambda step, _: extra_s if begin <= step < end else 0.0


def at_random(share: float, extra_s: float, when: Callable[[int], bool] = lambda _: True) -> Extra:
    chance = random.Random(3)
    return lambda step, _: extra_s if chance.random() < share and when(step) else 0.0


def lengths(spread: float, more_from: int = 10**9) -> Extra:
    """Tokens of a step: uneven, and twice as many from some step on."""
    chance = random.Random(5)
    drawn = [1000 * math.exp(spread * chance.gauss(0, 1)) for _ in range(1_500)]
    return lambda step, _: drawn[step] * (1 + (step >= more_from))


def for_tokens(tokens: Extra) -> Extra:
    """The computing time beyond that of 1,000 tokens."""
    return lambda step, rank: 0.8 * (tokens(step, rank) / 1000 - 1)


THIRD = [step for step in range(500, 800) if random.Random(step).random() < 0.35]
BURSTS = {f"a third of a rank's steps wait long ({n})": (
    "data_stall", "8 0.5 0.02", "500; 80 -> data_stall 2",
    {"wait": from_step(500, bursts(2, 0.3, 0.4, n))},
) for n in (5, 6, 7)}  # fmt: skip
# One rank, whose communication is noisy as well.
ALONE = "1 1 0.01 0.01"
UNEVEN, LONGER = lengths(0.15), lengths(0.1, more_from=800)
# Extras that no word says.
OTHERS: dict[str, tuple[str, str, str, dict[str, Extra]]] = {
    **BURSTS,
    "lone slow steps and lone slow batches are nothing": (
        "", "4 0.2 0.02", "1500",
        {
            "compute": lambda step, rank: 0.2 if step % 97 == rank else 0.0,
            "wait": lambda step, rank: 0.3 if step % 131 == rank else 0.0,
        },
    ),
    "a rank that is slow in a third of its steps, and well again": (
        "straggler", "8 0.5 0.02", "500; 300 -> straggler 4; 300",
        {"compute": in_steps(4, 0.25, *THIRD)},
    ),
    "lone slow batches of single ranks are none": (
        "data_stall", "4 0.5 0.02", "2500",
        {"wait": each_rank(*(bursts(rank, 1 / 150, 1.0, rank) for rank in range(4)))},
    ),
    "ranks that wait for the stalled one have no anomaly of theirs": (
        "data_stall straggler gc_pause", "4 0.5 0.02", "400; 300 -> data_stall 1",
        {"wait": from_step(400, bursts(1, 0.4, 0.5))},
    ),
    "gaps that vary by a step are equal": (
        "gc_pause", "4 0.2 0.01", "300; 200 -> gc_pause 2",
        {"compute": in_steps(2, 0.1, 330, 359, 390, 420, 449)},
    ),
    "a pause hidden in a checkpoint of all ranks breaks no chain": (
        "gc_pause", "4 0.2 0.01", "300; 170 compute 1 0.1 every 30 at 5 -> gc_pause 1",
        {"pause": in_steps(0, 30.0, 367)},
    ),
    "lone pauses of random ranks are none":
        ("gc_pause", "8 0.2 0.02", "2500", {"compute": lone_pauses(8, 0.02)}),
    "frequent pauses of one rank without a period are none":
        ("gc_pause", "4 0.2 0.02", "2500", {"compute": lone_pauses(1, 0.03)}),
    "a rise of ten percent in 600 steps is a drift until it goes away": (
        "step_drift", ALONE, "1200; 340 -> step_drift job; 200",
        {"compute": ramp(900, 600, 0.10, end=1540)},
    ),
    "and no regression":
        ("step_regression", ALONE, "2000", {"compute": ramp(900, 600, 0.10)}),
    "a rise of twelve percent in 5000 steps is found against the beginning": (
        "step_drift", ALONE, "4500; 600 -> step_drift job", {"compute": ramp(600, 5000, 0.12)},
    ),
    "a speed that settles by five percent is no drift": (
        "step_drift", ALONE, "4000", {"compute": lambda step, _: -0.05 * max(0, 1 - step / 400)},
    ),
    "a sudden shift is no drift": ("step_drift", ALONE, "3000", {"compute": since(1000, 0.2)}),
    "three steps of twenty that take half longer are spikes, and news when they come back": (
        "step_spikes", ALONE,
        "1010; 90 -> step_spikes job; 400 -> step_spikes job; 500; 300 -> step_spikes job; 500",
        {"comm": at_random(0.15, 0.5, lambda step: 1000 <= step < 1500 or 2000 <= step < 2300)},
    ),
    "lone slow steps are no spikes":
        ("step_spikes", ALONE, "5000", {"comm": at_random(0.015, 1.0)}),
    "slow steps with a period are no spikes":
        ("step_spikes", ALONE, "4000", {"comm": lambda step, _: 1.0 * (step % 20 == 0)}),
    "checkpoints and evaluations together are no spikes": (
        "step_spikes", ALONE, "5000",
        {"comm": lambda step, _: 9.0 * (step % 250 == 0) + 0.5 * (step % 200 == 0)},
    ),
    "every second step is no spikes":
        ("step_spikes", ALONE, "1500", {"comm": lambda step, _: 0.5 * (step % 2) * (step > 999)}),
    "three spikes and a rise soon after them are a rise": (
        "step_spikes", ALONE, "1500",
        {"comm": lambda at, _: 0.5 * (at in (1000, 1009, 1017) or (at > 1029 and at % 6 != 3))},
    ),
    "a level shift, however noisy, is no spikes":
        ("step_spikes", "1 1 0.04 0.04", "3000", {"compute": since(1000, 0.2)}),
    "milliseconds in short steps are no spikes": (
        "step_spikes", "1 0.02 0.01 0.01", "3000",
        {"compute": at_random(0.15, 0.01, lambda step: step >= 500)},
    ),
    "communication that doubles is slow until it is over": (
        "comm_slow", ALONE, "1005; 10 -> comm_slow job; 185 -> comm_slow job; 100",
        {"comm": since(1000, 0.1, end=1200)},
    ),
    "a network that wanders slowly is not slow": (
        "comm_slow", ALONE, "4000",
        {"comm": lambda step, _: 0.1 + 0.2 * math.expm1(0.15 * math.sin(step / 400))},
    ),
    "a job of which everything got slower has no slow communication": (
        "comm_slow", ALONE, "2000", {"compute": since(1000, 0.4), "comm": since(1000, 0.05)},
    ),
    "compute that got faster is no slow communication":
        ("comm_slow", ALONE, "2000", {"compute": since(1000, -0.4)}),
    "a job without communication has no slow one":
        ("comm_slow", "1 1 0.01", "500", {"comm": lambda *_: -0.1}),
    "tokens explain uneven steps so that five percent are found": (
        "step_regression", ALONE, "1010; 50 -> step_regression job; 140 -> step_regression job",
        {
            "compute": lambda step, rank: for_tokens(UNEVEN)(step, rank) + 0.06 * (step >= 1000),
            "tokens": UNEVEN,
        },
    ),
    "longer sequences that are counted are no regression": (
        "step_regression", ALONE, "1500", {"compute": for_tokens(LONGER), "tokens": LONGER},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_extras_of_any_form_are_found_or_none(name, golden_report):
    kinds, steps, story, extras = OTHERS[name]
    engine = alone(*kinds.split()) if kinds else detection()
    lived(job(steps), engine, story, **extras)
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
    story = f"500; {5 * period} compute 3 0.15 every {period} at 5 -> gc_pause 3"
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
