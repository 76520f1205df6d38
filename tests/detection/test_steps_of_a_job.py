"""step_drift, step_spikes, comm_slow and step_regression on a job's steps whose truth is known."""

import math
import random

import msgspec
import pytest

from tests.detection.jobs import Extra, Steps, begun
from tests.golden_lines import line
from warpwatch_detection.detector import Cleared, Detector
from warpwatch_detection.detectors.rises import CommSlow, StepDrift, StepRegression
from warpwatch_detection.detectors.step_spikes import StepSpikes
from warpwatch_telemetry.anomalies import Detected


def ramp(begin: int, length: int, rise: float) -> Extra:
    return lambda step: rise * min(max((step - begin) / length, 0.0), 1.0)


def since(begin: int, extra: float) -> Extra:
    return lambda step: extra if step >= begin else 0.0


def at_random(share: float, extra: float, begin: int = 0, seed: int = 3) -> Extra:
    source = random.Random(seed)
    return lambda step: extra if source.random() < share and step >= begin else 0.0


def tokens(spread: float, more_from: int = 10**9) -> Extra:
    lengths = random.Random(5)
    drawn = [int(1000 * math.exp(spread * lengths.gauss(0, 1))) for _ in range(1500)]
    return lambda step: float(drawn[step] * (1 + (step >= more_from)))


CHECKPOINTS: Extra = lambda n: 9.0 * (n % 250 == 0) + 0.5 * (n % 200 == 0)  # noqa: E731
# Detector, steps, their extras, and between which steps it is found, if at all.
STORIES: dict[str, tuple[type[Detector], int, dict[str, Extra], tuple[int, int] | None]] = {
    "a rise of ten percent in 600 steps is a drift":
        (StepDrift, 2000, {"compute": ramp(900, 600, 0.10)}, (1200, 1540)),
    "and no regression": (StepRegression, 2000, {"compute": ramp(900, 600, 0.10)}, None),
    "a rise of twelve percent in 5000 steps is found against the beginning":
        (StepDrift, 6500, {"compute": ramp(600, 5000, 0.12)}, (4500, 5600)),
    "a speed that settles by five percent is no drift":
        (StepDrift, 4000, {"compute": lambda n: -0.05 * max(0.0, 1 - n / 400)}, None),
    "a sudden shift is no drift": (StepDrift, 3000, {"compute": since(1000, 0.2)}, None),
    "three steps of twenty that take half longer are spikes":
        (StepSpikes, 1500, {"comm": at_random(0.15, 0.5, 1000)}, (1010, 1100)),
    "lone slow steps are no spikes": (StepSpikes, 5000, {"comm": at_random(0.015, 1.0)}, None),
    "slow steps with a period are no spikes":
        (StepSpikes, 4000, {"comm": lambda n: 1.0 if n % 20 == 0 else 0.0}, None),
    "checkpoints and evaluations together are no spikes":
        (StepSpikes, 5000, {"comm": CHECKPOINTS}, None),
    "communication that doubles is slow":
        (CommSlow, 1100, {"comm": since(1000, 0.2)}, (1005, 1015)),
    "a network that wanders slowly is not slow":
        (CommSlow, 4000, {"comm": lambda n: 0.2 * math.expm1(0.15 * math.sin(n / 400))}, None),
    "a job of which everything got slower has no slow communication":
        (CommSlow, 2000, {"compute": since(1000, 0.4), "comm": since(1000, 0.1)}, None),
    "compute that got faster is no slow communication":
        (CommSlow, 2000, {"compute": since(1000, -0.4)}, None),
    "a job without communication has no slow one": (CommSlow, 500, {"comm": lambda _: -1.0}, None),
    "tokens explain uneven steps so that five percent are found": (
        StepRegression, 1200, {"compute": since(1000, 0.06), "tokens": tokens(0.15)}, (1010, 1060),
    ),
    "longer sequences that are counted are no regression":
        (StepRegression, 1500, {"tokens": tokens(0.1, more_from=800)}, None),
}  # fmt: skip


@pytest.mark.parametrize("name", STORIES)
def test_what_is_found_is_what_happened(name, golden_case):
    make, count, extras, between = STORIES[name]
    detector = make()
    found = begun(detector, Steps().next(count, **extras))
    assert [
        between is not None and between[0] <= (one.step or 0) <= between[1] for one in found
    ] == ([] if between is None else [True])
    golden_case("".join(line("found", one) for one in (*found, *detector.statuses())))


@pytest.mark.parametrize(
    ("step_s", "noise", "compute"),
    [
        pytest.param(1.0, 0.04, since(1000, 0.2), id="a level shift, however noisy"),
        pytest.param(0.02, 0.01, at_random(0.15, 0.01, 500), id="milliseconds in short steps"),
    ],
)
def test_what_is_no_spike(step_s: float, noise: float, compute: Extra) -> None:
    assert begun(StepSpikes(), Steps(step_s, noise).next(3000, compute=compute)) == []


@pytest.mark.parametrize(
    ("make", "count", "extras", "calm"),
    [
        (StepDrift, 1500, {"compute": ramp(900, 600, 0.10)}, 200),
        (StepSpikes, 700, {"comm": at_random(0.2, 0.5, 500)}, 500),
        (CommSlow, 1200, {"comm": since(1000, 0.2)}, 100),
    ],
)
def test_what_went_away_is_over_and_a_restart_in_the_middle_changes_nothing(
    make, count, extras, calm
):
    detector, restarted, steps = make(), make(), list(Steps().next(count, **extras))
    (found,) = begun(detector, steps)
    assert [status.answer for status in detector.statuses()] == ["found"]
    again = begun(restarted, steps[: -count // 8])
    saved = msgspec.msgpack.encode(restarted.state)
    restarted.state = msgspec.msgpack.decode(saved, type=restarted.state_form)
    again += begun(restarted, steps[-count // 8 :])
    assert again[0] == found
    assert list(restarted.statuses()) == list(detector.statuses())
    source = Steps()
    list(source.next(count, **extras))
    begun(detector, source.next(calm))
    assert [status.answer for status in detector.statuses()] in (["fine"], ["learning"])


def test_spikes_come_back_as_news() -> None:
    detector, steps = StepSpikes(), Steps()
    for count, extra in ((700, at_random(0.2, 0.5, 500)), (300, at_random(0.2, 0.5))):
        assert len(begun(detector, steps.next(count, comm=extra))) == 1
        begun(detector, steps.next(500))
        assert [status.answer for status in detector.statuses()] == ["fine"]


def test_a_second_rise_on_top_of_the_first_is_another_anomaly() -> None:
    detector = StepRegression()
    steps = Steps().next(1200, compute=lambda n: 0.2 * (n >= 500) + 0.2 * (n >= 900))
    results = [result for step in steps for result in detector.observe(step)]
    (over,) = [result for result in results if isinstance(result, Cleared) and result.for_good]
    second = results[results.index(over) + 1]
    assert isinstance(second, Detected)
    assert second.baseline == pytest.approx(1.2, abs=0.02)


def test_readings_say_why_nothing_was_found() -> None:
    # The job goes on from a checkpoint.
    detector, steps = StepRegression(), Steps(first=5000)
    begun(detector, steps.next(60))
    assert [status.answer for status in detector.statuses()] == ["learning"]
    begun(detector, steps.next(600))
    (status,) = detector.statuses()
    assert (status.answer, "limit" in status.text) == ("fine", True)
    assert 0 < (status.nearest or 0) < 1
    assert 5000 < (status.nearest_step or 0) < 5660
