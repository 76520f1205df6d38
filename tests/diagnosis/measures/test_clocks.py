"""The same kernels on two devices: one factor for all of them, or other work."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from warpwatch_diagnosis.measures.clocks import SizeTime, size_times, slowdown
from warpwatch_diagnosis.trace.events import Event

WINDOW = (0.0, 1000.0)
FORWARD, BACKWARD = {"grid": [64, 1, 1]}, {"grid": [128, 1, 1]}
_correlations = count(1)


def kernel(name: str, took_us: float, arguments: dict[str, list[int]] | None = None) -> Event:
    return Event(name, 100.0, 100.0 + took_us, "0/7", next(_correlations), arguments)


def times(*kernels: Event) -> dict[tuple[str, tuple[object, ...]], SizeTime]:
    return size_times(kernels, {}, WINDOW)


def test_forward_and_backward_of_one_name_are_two_sizes() -> None:
    found = times(
        kernel("gemm", 10, FORWARD), kernel("gemm", 20, BACKWARD), kernel("gemm", 12, dict(FORWARD))
    )
    assert found == {
        ("gemm", (64, 1, 1)): SizeTime(2, 22.0, 11.0),
        ("gemm", (128, 1, 1)): SizeTime(1, 20.0, 20.0),
    }


@pytest.mark.parametrize(
    ("now", "before", "factor"),
    [
        # Whatever the mixture of sizes.
        ([(13, FORWARD)] * 5 + [(26, BACKWARD)], [(10, FORWARD)] * 5 + [(20, BACKWARD)] * 9, 1.3),
        # Larger grids, and more kernels.
        ([(20, BACKWARD)], [(10, FORWARD)], None),
        ([(10, FORWARD)] * 3, [(10, FORWARD)], None),
    ],
)
def test_lower_clocks_stretch_the_same_kernels(now: Any, before: Any, factor: float | None) -> None:
    one, other = (times(*(kernel("gemm", us, grid) for us, grid in k)) for k in (now, before))
    assert slowdown(one, other) == (factor and pytest.approx(factor))


def test_one_slower_kernel_of_two_is_no_lower_clock() -> None:
    before = times(kernel("gemm", 10), kernel("norm", 10))
    assert slowdown(times(kernel("gemm", 15), kernel("norm", 10)), before) is None


def test_a_kernel_belongs_to_where_it_was_launched() -> None:
    late = Event("gemm", 1500.0, 1510.0, "0/7", 7)
    early = Event("gemm", 100.0, 130.0, "0/7", 8)
    calls: dict[int | None, Event] = {
        7: Event("cudaLaunchKernel", 900.0, 905.0, "1/1", 7),
        8: Event("cudaLaunchKernel", -50.0, -45.0, "1/1", 8),
    }
    assert size_times([early, late], calls, WINDOW) == {("gemm", ()): SizeTime(1, 10.0, 10.0)}


def test_collectives_wait_and_tell_nothing() -> None:
    assert times(kernel("ncclDevKernel_AllReduce", 10)) == {}
