"""step_drift on rises whose truth is known."""

from __future__ import annotations

import msgspec
import pytest

from tests.detection.jobs import Extra, Steps, begun
from warpwatch_detection.detectors.step_drift import StepDrift
from warpwatch_detection.detectors.step_regression import StepRegression


def ramp(begin: int, length: int, rise: float) -> Extra:
    return lambda step: rise * min(max((step - begin) / length, 0.0), 1.0)


def drift() -> StepDrift:
    return StepDrift()


def test_a_rise_of_ten_percent_in_600_steps_is_a_drift_and_no_regression():
    slow, level = drift(), StepRegression()
    steps = list(Steps().next(2000, compute=ramp(900, 600, 0.10)))
    (found,) = begun(slow, steps)
    assert begun(level, steps) == []
    assert 1200 <= (found.step or 0) <= 1540
    assert found.baseline == pytest.approx(1.01, abs=0.03)
    assert "slowly become" in found.summary


def test_a_rise_of_twelve_percent_in_5000_steps_is_found_against_the_beginning():
    (found,) = begun(drift(), Steps().next(6500, compute=ramp(600, 5000, 0.12)))
    assert found.step is not None
    assert 4500 <= found.step <= 5600
    assert (found.begin_step or 0) < 100


def test_a_speed_that_settles_by_five_percent_is_no_drift():
    assert begun(drift(), Steps().next(4000, compute=lambda n: -0.05 * max(0.0, 1 - n / 400))) == []


def test_a_sudden_shift_is_another_detectors():
    assert begun(drift(), Steps().next(3000, compute=lambda n: 0.2 if n >= 1000 else 0.0)) == []


def test_a_drift_that_went_back_is_over():
    detector, steps = drift(), Steps()
    assert len(begun(detector, steps.next(1500, compute=ramp(900, 600, 0.10)))) == 1
    assert [r.answer for r in detector.statuses()] == ["found"]
    begun(detector, steps.next(200))
    assert [r.answer for r in detector.statuses()] in (["fine"], ["learning"])


def test_its_state_outlives_a_restart():
    detector, steps = drift(), Steps()
    begun(detector, steps.next(1200, compute=ramp(900, 600, 0.10)))
    again = drift()
    saved = msgspec.msgpack.encode(detector.state)
    again.state = msgspec.msgpack.decode(saved, type=type(detector.state))
    assert len(begun(again, steps.next(800, compute=ramp(900, 600, 0.10)))) == 1
