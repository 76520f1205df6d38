"""step_spikes on slow steps whose truth is known."""

from __future__ import annotations

import random

import msgspec
import pytest

from tests.detection.jobs import Extra, Steps, begun
from warpwatch_detection.detectors.step_spikes import StepSpikes


def spikes() -> StepSpikes:
    return StepSpikes()


def at_random(share: float, extra: float, begin: int, seed: int = 3) -> Extra:
    source = random.Random(seed)
    return lambda step: extra if source.random() < share and step >= begin else 0.0


def test_three_steps_of_twenty_that_take_half_longer_are_found_within_100_steps():
    (found,) = begun(spikes(), Steps().next(1500, comm=at_random(0.15, 0.5, 1000)))
    assert 1010 <= (found.step or 0) <= 1100
    assert 1000 <= (found.begin_step or 0) <= (found.step or 0)
    assert found.value == pytest.approx(0.15, abs=0.1)
    assert found.baseline == pytest.approx(0.01, abs=0.005)


def test_lone_slow_steps_raise_nothing():
    assert begun(spikes(), Steps().next(5000, comm=at_random(0.015, 1.0, 0))) == []


def test_slow_steps_with_a_period_raise_nothing():
    assert begun(spikes(), Steps().next(5000, comm=lambda n: 1.0 if n % 20 == 0 else 0.0)) == []


def test_checkpoints_and_evaluations_together_raise_nothing():
    steps = Steps().next(6000, comm=lambda n: 9.0 * (n % 250 == 0) + 0.5 * (n % 200 == 0))
    assert begun(spikes(), steps) == []


def test_a_level_shift_is_no_spike_however_noisy():
    steps = Steps(noise=0.04).next(3000, compute=lambda n: 0.2 if n >= 1000 else 0.0)
    assert begun(spikes(), steps) == []


def test_hiccups_of_a_few_milliseconds_do_not_count_in_short_steps():
    steps = Steps(step_s=0.02).next(3000, compute=at_random(0.15, 0.01, 500))
    assert begun(spikes(), steps) == []


def test_spikes_that_went_away_are_over_and_come_back_as_news():
    detector, steps = spikes(), Steps()
    assert len(begun(detector, steps.next(700, comm=at_random(0.2, 0.5, 500)))) == 1
    begun(detector, steps.next(500))
    assert [r.answer for r in detector.statuses()] == ["fine"]
    assert len(begun(detector, steps.next(300, comm=at_random(0.2, 0.5, 0)))) == 1


def test_its_state_outlives_a_restart():
    detector, steps = spikes(), Steps()
    begun(detector, steps.next(1020, comm=at_random(0.15, 0.5, 1000)))
    again = spikes()
    saved = msgspec.msgpack.encode(detector.state)
    again.state = msgspec.msgpack.decode(saved, type=type(detector.state))
    assert again.state == detector.state
