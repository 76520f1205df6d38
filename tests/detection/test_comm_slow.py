"""comm_slow on communication whose truth is known."""

from __future__ import annotations

import math

import pytest

from tests.detection.jobs import Steps, begun
from warpwatch_detection.detectors.comm_slow import CommSlow


def slow() -> CommSlow:
    return CommSlow()


def test_communication_that_doubles_is_found_within_15_steps():
    (found,) = begun(slow(), Steps().next(1100, comm=lambda n: 0.2 if n >= 1000 else 0.0))
    assert 1005 <= (found.step or 0) <= 1015
    assert 0.28 < (found.value or 0) < 0.45
    assert found.baseline == pytest.approx(0.2, abs=0.02)
    assert "compute does not" in found.summary


def test_a_network_that_wanders_slowly_raises_nothing():
    steps = Steps().next(4000, comm=lambda n: 0.2 * math.expm1(0.15 * math.sin(n / 400)))
    assert begun(slow(), steps) == []


def test_a_job_of_which_everything_got_slower_is_no_slow_communication():
    steps = Steps().next(
        2000,
        compute=lambda n: 0.4 if n >= 1000 else 0.0,
        comm=lambda n: 0.1 if n >= 1000 else 0.0,
    )
    assert begun(slow(), steps) == []


def test_compute_that_got_faster_is_no_slow_communication():
    steps = Steps().next(2000, compute=lambda n: -0.4 if n >= 1000 else 0.0)
    assert begun(slow(), steps) == []


def test_congestion_that_is_over_is_fine():
    detector, steps = slow(), Steps()
    assert len(begun(detector, steps.next(1200, comm=lambda n: 0.2 if n >= 1000 else 0.0))) == 1
    begun(detector, steps.next(100))
    assert [r.answer for r in detector.statuses()] == ["fine"]


def test_a_job_without_communication_says_nothing():
    detector = slow()
    steps = Steps(step_s=1.0).next(500, comm=lambda _: -1.0)
    assert begun(detector, steps) == []
