"""What the straggler detector need not look at."""

from __future__ import annotations

import random
import statistics

import pytest

from warpwatch_detection.signals.guarded_median import GuardedMedian


@pytest.mark.parametrize("size", [5, 20])
def test_a_median_never_passes_its_guard_unnoticed(size):
    noise, window = random.Random(1), GuardedMedian.of_size(size)
    passed = quiet = 0
    for number in range(3000):
        window.add(noise.gauss(0.0, 1.0))
        if number % 50 == 0:
            window.watch(noise.choice([-0.3, 0.0, 0.3, 3.0]))
        if not window.full:
            continue
        assert window.median() == statistics.median(window.values)
        if window.median() > window.guard:
            passed += 1
            assert 2 * window.above >= size
        quiet += 2 * window.above < size
    assert passed > 500
    assert quiet > 500


def test_a_window_that_is_not_full_has_nothing_above_any_guard_but_what_it_was_given():
    window = GuardedMedian.of_size(5)
    window.watch(0.0)
    for value in (1.0, -1.0, 2.0, 3.0):
        window.add(value)
    assert (window.full, window.above) == (False, 3)
    window.add(4.0)
    assert (window.full, window.above, window.median()) == (True, 4, 2.0)
    window.clear()
    assert (window.full, window.above) == (False, 0)


def test_quartile_and_error_are_those_of_the_values_in_order():
    window = GuardedMedian.of_size(8)
    for value in (8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0):
        window.add(value)
    middle = window.middle()
    assert (middle.median, middle.upper_quartile) == (4.5, 7.0)
    assert middle.error == pytest.approx(1.2533 / 1.349 * (7 - 3) / 8**0.5)
