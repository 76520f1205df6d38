"""Level shifts in windows of several lengths, and the median of a window that slides."""

import random
import statistics

import pytest

from warpwatch_detection.signals.baselines import SlidingMedian
from warpwatch_detection.signals.level_shift import (
    LevelShift,
    Shift,
    quantile_of,
)


def shifts(values: list[float]) -> list[tuple[int, Shift]]:
    sought = LevelShift()
    reported = ((n, look(sought, value)) for n, value in enumerate(values))
    return [(n, shift) for n, shift in reported if shift is not None]


def look(sought: LevelShift, value: float, rate: float = 2e-6) -> Shift | None:
    return sought.add(value, rate)


def test_twenty_percent_need_few_samples_and_five_percent_more():
    source = random.Random(1)
    noise = [source.gauss(0, 0.005) for _ in range(1000)]
    for rise, least, most in ((0.2, 505, 515), (0.09, 508, 520), (0.05, 515, 560)):
        ((found, shift),) = shifts([x + rise * (n >= 500) for n, x in enumerate(noise)])
        assert least <= found <= most
        assert shift.before == pytest.approx(0.0, abs=0.01)


def test_a_rise_of_a_half_is_found_whatever_is_known_of_the_noise():
    """With few samples the noise is so uncertain that its limit is over 100 %."""
    limits = []
    for seed in range(20):
        source, sought, found = random.Random(seed), LevelShift(), []
        for n in range(200):
            neighbour = 0.6 * (n // 25 % 2)
            value = neighbour * source.random() + abs(source.gauss(0, 0.2)) + (n >= 90)
            if look(sought, value, rate=1e-12) is not None:
                found.append(n)
            if n == 89:
                limits.append(sought.limit(1e-12))
        assert found and found[0] <= 90 + 72, (seed, found)
    assert statistics.median(limits) > 1.0


def test_autocorrelated_noise_raises_nothing():
    for memory, sigma in ((0.7, 0.02), (0.9, 0.15)):
        source, values, value = random.Random(2), [], 0.0
        for _ in range(10_000):
            value = memory * value + source.gauss(0, sigma)
            values.append(value)
        assert shifts(values) == []


@pytest.mark.parametrize("begin", [150, 250])
def test_a_slow_rise_does_not_teach_its_own_limit(begin: int) -> None:
    """By a tenth in 200 samples: soon after the start little is known of the noise."""
    late = []
    for seed in range(10):
        source, values, noise = random.Random(seed), [], 0.0
        for n in range(begin + 230):
            noise = 0.5 * noise + source.gauss(0, 0.008)
            values.append(noise + 0.1 * min(max((n - begin) / 200, 0.0), 1.0))
        rises = [n for n, shift in shifts(values) if shift.difference > 0]
        assert not rises or rises[0] > begin
        late += [seed] * (not rises)
    assert len(late) <= 1


def test_one_slow_step_in_five_is_no_level():
    source = random.Random(3)
    values = [source.gauss(0, 0.01) + 0.4 * (source.random() < 0.1) for _ in range(5000)]
    assert shifts(values) == []


def test_a_fall_is_found_once_and_its_end_is_a_rise():
    source = random.Random(4)
    values = [source.gauss(0, 0.01) - 0.3 * (500 <= n < 900) for n in range(1200)]
    assert [shift.difference > 0 for _, shift in shifts(values)] == [False, True]


def test_a_job_that_has_settled_by_eight_percent_hides_no_five_percent_later():
    source = random.Random(7)
    settled = [0.08 * min(n / 400, 1.0) + source.gauss(0, 0.01) for n in range(1400)]
    ((found, _),) = shifts([x + 0.05 * (n >= 1200) for n, x in enumerate(settled)])
    assert 1210 <= found <= 1250


def test_the_limit_is_never_less_than_that_of_independent_samples():
    sought = LevelShift()
    for n in range(2000):
        # The windows do not differ, and neighbours do by 0.1.
        look(sought, 0.1 * (n % 2))
    # 0.1 * sqrt(pi) / 2 * 1.27 * sqrt(1 / 140 + 1 / 200)
    assert sought.deviation(2e-6) == pytest.approx(0.012403 * quantile_of(140, 2e-6), rel=1e-3)


def test_what_it_remembers_of_samples_is_bounded():
    source, sought = random.Random(6), LevelShift()
    for _ in range(3000):
        look(sought, source.gauss(0, 0.01))
    references = sought.samples.references
    assert len(sought.samples.values) < 700
    assert len(references.ordered) == 200
    assert len(references.levels) < 700


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
