"""The median of a window that slides."""

from __future__ import annotations

import random
import statistics

import pytest

from warpwatch_detection.signals.medians import SlidingMedian


@pytest.mark.parametrize("size", [5, 20])
def test_a_sliding_median_is_that_of_the_last_values(size: int) -> None:
    noise, window = random.Random(1), SlidingMedian(size)
    values: list[float] = []
    for _ in range(500):
        values.append(noise.gauss(0.0, 1.0))
        window.add(values[-1])
        assert window.median() == statistics.median(values[-size:])
        assert window.full == (len(values) >= size)
    window.clear()
    assert not window.full
    window.add(3.0)
    assert window.median() == 3.0


def test_quartile_and_error_are_those_of_the_values_in_order() -> None:
    window = SlidingMedian(8)
    for value in (8.0, 1.0, 7.0, 2.0, 6.0, 3.0, 5.0, 4.0):
        window.add(value)
    assert (window.median(), window.upper_quartile()) == (4.5, 7.0)
    assert window.error() == pytest.approx(1.2533 / 1.349 * (7 - 3) / 8**0.5)
