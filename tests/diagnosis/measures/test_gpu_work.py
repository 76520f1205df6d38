"""Names of kernels, copies and devices, and what lower clocks do to kernels."""

import json
from itertools import count
from pathlib import Path

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

FIXTURES = Path(__file__).parents[1] / "fixtures"
# From traces of many versions and devices: class and name.
CLASSES = FIXTURES / "kernel_classes.tsv"
# Device, its name here, GB/s, TFLOP/s by type.
PEAKS = FIXTURES / "peaks.tsv"


def test_the_class_of_a_kernel_follows_from_its_name() -> None:
    names = [line.split("\t") for line in CLASSES.read_text().splitlines()]
    found = [[classify(name), name] for _, name in names]
    assert len(found) > 40
    assert found == names


def test_a_copys_name_has_direction_and_memory(cases: Cases) -> None:
    cases("diagnosis/copies.txt", copy_kind)


@pytest.mark.parametrize("row", PEAKS.read_text().splitlines())
def test_a_devices_name_finds_its_data_sheet(row):
    device, name, gb_per_s, tflops = row.split("\t")
    peaks = peaks_of(device)
    assert (peaks.name, peaks.memory_bytes_per_s) == (name, float(gb_per_s) * 1e9)
    assert {k: round(v / 1e12, 3) for k, v in peaks.flops_per_s.items()} == json.loads(tflops)
    assert "data sheet" in peaks.source or "brief" in peaks.source


MIG = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


@pytest.mark.parametrize("device", [None, "AMD Radeon", "NVIDIA A1000", "GeForce GTX 1", MIG])
def test_an_unknown_device_and_a_part_of_one_have_no_peaks(device):
    assert peaks_of(device) is None


@pytest.mark.parametrize("device", ["NVIDIA H800", "NVIDIA H20", "NVIDIA A10G"])
def test_the_float64_rate_that_no_data_sheet_has_is_unknown(device):
    assert "float64" not in peaks_of(device).flops_per_s


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
