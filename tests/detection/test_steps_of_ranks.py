"""step_regression, straggler, data_stall and gc_pause on steps of a job whose truth is known."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.detection.jobs import joined
from tests.detection.streams import Extra, Job, alone, detection, lived, on, opened
from warpwatch_detection.detectors.data_stall import DataStall
from warpwatch_detection.detectors.straggler import Straggler
from warpwatch_detection.job_steps import JobSteps
from warpwatch_telemetry.records import RankEvent


def job(text: str) -> Job:
    ranks, step_s, noise = text.split()
    return Job(int(ranks), float(step_s), float(noise))


# Kinds that look, or all; ranks, seconds a step and noise; the steps, as `lived` reads them.
STORIES = {
    "a checkpoint of ten steps every 250 is nothing":
        ("", "4 0.5 0.02", "1; 1500 pause all 5 every 250"),
    "ten percent more on all ranks where noise is small":
        ("", "8 0.5 0.02", "300; 60 compute all 0.05 -> step_regression job"),
    "a new regime is found once and is normal after ten minutes": (
        "", "2 0.5 0.02", "300; 600 compute all 0.25 -> step_regression job; "
        "1000 compute all 0.25; 100 compute all 0.5 -> step_regression job",
    ),
    "a regression that went away is closed":
        ("", "2 0.5 0.02", "300; 100 compute all 0.2 -> step_regression job; 100"),
    "a rank 15 percent slower than seven peers, within 60 steps":
        ("", "8 0.5 0.02", "400; 60 compute 3 0.06 -> straggler 3"),
    "a rank slow from the start": ("", "4 0.5 0.02", "150 compute 2 0.16 -> straggler 2"),
    "a rank slow while it is learned":
        ("", "3 0.05 0.02", "220; 380 compute 2 0.12 -> straggler 2"),
    "two slow ranks are one anomaly of the job":
        ("", "8 0.5 0.02", "300; 100 compute 1,6 0.2 -> straggler job"),
    "pauses of one rank every 30 steps are no straggler":
        ("straggler", "8 0.5 0.02", "600 compute 2 0.6 every 30"),
    "pauses of one rank in short steps are no straggler":
        ("straggler", "4 0.01 0.1", "1000; 2000 compute 2 0.1 every 12"),
    "a rank that is itself again is over and may be slow again": (
        "straggler", "4 0.5 0.02",
        "300; 100 compute 1 0.15 -> straggler 1; 100; 60 compute 1 0.15 -> straggler 1",
    ),
    "one of two ranks that recovered does not make the other slow":
        ("straggler", "2 0.5 0.02", "300; 1500 compute 1 0.15 -> straggler 1; 500"),
    "input that stalls one rank names it":
        ("", "8 0.2 0.02", "300; 200 wait 5 0.1 -> data_stall 5"),
    "input that stalls one rank from the first step":
        ("data_stall", "4 0.5 0.02", "120 wait 3 0.4 -> data_stall 3"),
    "all ranks that stall are one anomaly, and over when it went away":
        ("data_stall", "4 0.5 0.02", "400; 100 wait all 0.1 -> data_stall job; 120"),
    "waits that were always there are the job's way":
        ("data_stall", "4 0.5 0.02", "1500 wait all 0.3 every 8"),
    "input that got better and worse again is a stall":
        ("data_stall", "2 0.5 0.02", "400 wait all 0.1; 400; 120 wait all 0.1 -> data_stall job"),
    "a stall that begins while the waits are learned":
        ("", "3 0.05 0.02", "80; 500 wait 2 0.03 -> data_stall 2"),
    "pauses of all ranks at once are none":
        ("gc_pause", "4 0.2 0.02", "1500 pause all 1 every 50 at 49"),
    **{
        f"what rank 0 does alone for {seconds} s every {period} is no pause": (
            "gc_pause", "4 0.2 0.02", f"1500 compute 0 {seconds} every {period}",
        )
        for period, seconds in (("100 at 99", 0.2), ("250 at 249", 4), ("50 at 49", 20), (50, 0.1))
    },
    "regular pauses that stopped are over":
        ("gc_pause", "4 0.2 0.01", "300; 200 compute 1 0.1 every 30 at 5 -> gc_pause 1; 150"),
    "reported pauses of all ranks are one anomaly of the job":
        ("gc_pause", "4 0.04 0.2", "300; 500 tell all 0.05 every 30 at 5 -> gc_pause job"),
    "reported pauses of a job with one rank, and over after a while":
        ("gc_pause", "1 0.1 0.05", "100; 400 tell 0 0.1 every 25 at 5 -> gc_pause 0; 2500"),
    "reported pauses that are cheap": ("gc_pause", "2 0.1 0.05", "2000 tell 1 0.03 every 100"),
    "reported pauses that are rare": ("gc_pause", "2 0.1 0.05", "2000 tell 1 5 every 1000 at 5"),
    "a burst of reported pauses that costs little over a minute":
        ("gc_pause", "2 0.1 0.05", "1000; 10 tell 0 0.02"),
    # Regular slow steps of a rank whose collections are known to be cheap have another cause.
    "what the shim says is believed over the step times": (
        "gc_pause", "4 0.2 0.01",
        "300; 200 tell 1 0.012 every 20; 300 compute 1 0.1 every 30 at 5 tell 1 0.012 every 20",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_what_is_found_and_over_is_what_happened(name: str) -> None:
    kinds, steps, story = STORIES[name]
    lived(job(steps), alone(*kinds.split()) if kinds else detection(), story)


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


THIRD = [step for step in range(500, 800) if random.Random(step).random() < 0.35]
BURSTS = {f"a third of a rank's steps wait long ({n})": (
    "data_stall", "8 0.5 0.02", "500; 80 -> data_stall 2",
    {"wait": from_step(500, bursts(2, 0.3, 0.4, n))},
) for n in (5, 6, 7)}  # fmt: skip
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
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_extras_of_any_form_are_found_or_none(name: str) -> None:
    kinds, steps, story, extras = OTHERS[name]
    lived(job(steps), alone(*kinds.split()) if kinds else detection(), story, **extras)


@pytest.mark.parametrize(
    ("kind", "extra", "noisy"),
    [
        ("straggler", {"compute": lambda s, r: 0.06 if r == 1 and s // 20 % 3 == 0 else 0.0}, 500),
        ("data_stall", {"wait": lambda s, r: 0.05 if r == 1 and s // 10 % 4 == 0 else 0.0}, 400),
    ],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_noise_of_one_rank_that_its_peers_do_not_share_hides_no_fault_of_it(
    kind: str, extra: dict[str, Extra], noisy: int, ranks: int
) -> None:
    steps, engine = Job(ranks, 0.1, 0.02), detection() if kind == "straggler" else alone(kind)
    opened(engine, [*steps.steps(noisy, **extra), *steps.steps(250)])
    phase = "compute 1 0.04" if kind == "straggler" else "wait 1 0.03"
    lived(steps, engine, f"50; 300 {phase} -> {kind} 1")


@pytest.mark.parametrize(("step_s", "noise"), [(0.02, 0.3), (0.04, 0.2), (0.5, 0.01)])
def test_6000_healthy_steps_with_noise_raise_nothing(step_s: float, noise: float) -> None:
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
    fault: str, kind: str, rank: int | None, says: str
) -> None:
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


def test_input_that_was_slow_from_the_first_step_is_found_too() -> None:
    (found,) = lived(Job(2, 0.04, 0.2), detection(), "300 wait all 0.06 -> data_stall job")
    assert found.baseline is None
    assert "from the start" in found.summary


@pytest.mark.parametrize("period", [7, 20, 41, 60])
def test_a_rank_that_pauses_at_equal_gaps_is_named_within_five_periods(period: int) -> None:
    story = f"500; {5 * period} compute 3 0.15 every {period} at 5 -> gc_pause 3"
    (found,) = lived(Job(8, 0.2, 0.01), alone("gc_pause"), story)
    assert f"every {period} steps" in found.summary
    assert found.value == pytest.approx(0.15 / (period * 0.2), rel=0.4)
    assert abs((found.begin_step or 0) - 500) <= period


def test_a_job_that_got_faster_is_not_reported_but_remembered() -> None:
    steps, engine = Job(2, 0.5, 0.02), detection()
    lived(steps, engine, "300")
    steps.step_s = 0.3
    lived(steps, engine, "300")
    steps.step_s = 0.5
    lived(steps, engine, "60 -> step_regression job")


def test_steps_of_a_capture_are_not_judged() -> None:
    steps, engine = Job(2, 0.5, 0.02), detection()
    lived(steps, engine, "300")
    for rank in (0, 1):
        engine.feed(RankEvent(steps.time, "llama", rank, "capture_started"))
    lived(steps, engine, "100 compute all 0.2")
    for rank in (0, 1):
        engine.feed(RankEvent(steps.time, "llama", rank, "capture_finished"))
    lived(steps, engine, "100")


def test_a_disabled_detector_says_nothing() -> None:
    engine = detection(step_regression={"enabled": False})
    lived(Job(2, 0.5, 0.02), engine, "300; 100 compute all 0.2")


def test_steps_without_phases_wait_for_nothing() -> None:
    engine = alone("data_stall", "straggler", "gc_pause")
    steps = Job(1, 0.5, 0.02).steps(1_000, compute=bursts(0, 0.3, 0.4))
    assert opened(engine, (replace(step, phases_s={}) for step in steps)) == []


@pytest.mark.parametrize(
    ("make", "phase", "few", "value", "limit"),
    [(Straggler, "compute", 60, 1.1, 1.13), (DataStall, "wait", 30, 0.07, 0.14)],
)
def test_readings_say_what_was_seen_and_how_near_it_came(
    make: Callable[[], Straggler | DataStall], phase: str, few: int, value: float, limit: float
) -> None:
    detector, steps, ranks = make(), JobSteps(), Job(4, 0.5, 0.02)
    for step in joined(ranks.steps(few), steps):
        detector.observe(step)
    assert {status.answer for status in detector.statuses()} == {"learning"}
    for step in joined(ranks.steps(400, **{phase: on(1, 0.03)}), steps):
        detector.observe(step)
    second = list(detector.statuses())[1]
    assert (second.answer, second.job, second.rank) == ("fine", "llama", 1)
    assert second.value == pytest.approx(value, abs=0.05)
    assert second.limit == pytest.approx(limit, abs=0.09)
    assert 0 < (second.nearest or 0) < 1
