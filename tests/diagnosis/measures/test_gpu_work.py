"""Names of kernels, copies and devices, and what lower clocks do to kernels."""

from itertools import count

import pytest

from tests.conftest import Cases
from warpwatch_diagnosis.measures.gpu_work import (
    GpuWork,
    SizeTime,
    classify,
    copy_kind,
    size_times,
    slowdown,
)
from warpwatch_diagnosis.measures.roofline import peaks_of
from warpwatch_diagnosis.trace.events import TraceEvent


def test_the_class_of_a_kernel_follows_from_its_name(cases: Cases) -> None:
    """The names are from traces of many versions and devices."""
    cases("diagnosis/kernels.txt", classify)


def test_a_copys_name_has_direction_and_memory(cases: Cases) -> None:
    cases("diagnosis/copies.txt", copy_kind)


def test_a_devices_name_finds_its_data_sheet(cases: Cases) -> None:
    """A part of a GPU has none, and no data sheet has some rates."""
    cases("diagnosis/peaks.txt", peaks_of)


WINDOW = (0.0, 1000.0)
FORWARD, BACKWARD = {"grid": [64, 1, 1]}, {"grid": [128, 1, 1]}
_correlations = count(1)


def kernel(name: str, took_us: float, arguments: dict[str, list[int]] | None = None) -> TraceEvent:
    return TraceEvent(name, 100.0, 100.0 + took_us, "0/7", next(_correlations), arguments)


def times(*kernels: TraceEvent) -> dict[tuple[str, tuple[object, ...]], SizeTime]:
    return size_times(GpuWork(WINDOW, kernels, (), kernels, {}, ()))


@pytest.mark.parametrize(
    ("now", "before", "factor"),
    [
        # The mixture of sizes does not matter.
        ([(13, FORWARD)] * 5 + [(26, BACKWARD)], [(10, FORWARD)] * 5 + [(20, BACKWARD)] * 9, 1.3),
        # Larger grids, and more kernels.
        ([(20, BACKWARD)], [(10, FORWARD)], None),
        ([(10, FORWARD)] * 3, [(10, FORWARD)], None),
        # Too few are slower, or known, or by too little.
        ([(13, FORWARD)] * 6 + [(20, BACKWARD)] * 2, [(10, FORWARD), (20, BACKWARD)], None),
        ([(13, FORWARD), (13, BACKWARD)], [(10, FORWARD)], None),
        ([(10.4, FORWARD)], [(10, FORWARD)], None),
    ],
)
def test_lower_clocks_stretch_the_same_kernels(now, before, factor):
    one, other = (times(*(kernel("gemm", us, grid) for us, grid in k)) for k in (now, before))
    assert slowdown(one, other) == (factor and pytest.approx(factor))
