"""Peaks of known devices, what limits a class of kernels, and lower clocks."""

import json
from itertools import count
from pathlib import Path

import pytest

from warpwatch_diagnosis.measures.gpu_work import GpuEvents, SizeTime, size_times, slowdown
from warpwatch_diagnosis.measures.roofline import peaks_of
from warpwatch_diagnosis.trace.events import TraceEvent

# Device, its name here, GB/s, TFLOP/s by type.
PEAKS = Path(__file__).parents[1] / "fixtures" / "peaks.tsv"


@pytest.mark.parametrize("row", PEAKS.read_text().splitlines())
def test_a_devices_name_finds_its_data_sheet(row):
    device, name, gb_per_s, tflops = row.split("\t")
    peaks = peaks_of(device)
    assert (peaks.name, peaks.memory_bytes_per_s) == (name, float(gb_per_s) * 1e9)
    assert {k: round(v / 1e12, 3) for k, v in peaks.flops_per_s.items()} == json.loads(tflops)
    assert "data sheet" in peaks.source or "brief" in peaks.source


@pytest.mark.parametrize("device", [None, "AMD Radeon Graphics", "NVIDIA A1000", "GeForce GTX 1"])
def test_an_unknown_device_has_no_peaks(device):
    assert peaks_of(device) is None


def test_the_float64_rate_that_no_data_sheet_has_is_unknown():
    for device in ("NVIDIA H800", "NVIDIA H20", "NVIDIA A10G"):
        peaks = peaks_of(device)
        assert peaks is not None and "float64" not in peaks.flops_per_s


WINDOW = (0.0, 1000.0)
FORWARD, BACKWARD = {"grid": [64, 1, 1]}, {"grid": [128, 1, 1]}
_correlations = count(1)


def kernel(name: str, took_us: float, arguments: dict[str, list[int]] | None = None) -> TraceEvent:
    return TraceEvent(name, 100.0, 100.0 + took_us, "0/7", next(_correlations), arguments)


def times(*kernels: TraceEvent) -> dict[tuple[str, tuple[object, ...]], SizeTime]:
    return size_times(GpuEvents(WINDOW, kernels, (), kernels, {}, ()))


def test_forward_and_backward_of_one_name_are_two_sizes():
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
        # The mixture of sizes does not matter.
        ([(13, FORWARD)] * 5 + [(26, BACKWARD)], [(10, FORWARD)] * 5 + [(20, BACKWARD)] * 9, 1.3),
        # Larger grids, and more kernels.
        ([(20, BACKWARD)], [(10, FORWARD)], None),
        ([(10, FORWARD)] * 3, [(10, FORWARD)], None),
    ],
)
def test_lower_clocks_stretch_the_same_kernels(now, before, factor):
    one, other = (times(*(kernel("gemm", us, grid) for us, grid in k)) for k in (now, before))
    assert slowdown(one, other) == (factor and pytest.approx(factor))


def test_one_slower_kernel_of_two_is_no_lower_clock():
    before = times(kernel("gemm", 10), kernel("norm", 10))
    assert slowdown(times(kernel("gemm", 15), kernel("norm", 10)), before) is None


def test_a_kernel_belongs_to_where_it_was_launched():
    late = TraceEvent("gemm", 1500.0, 1510.0, "0/7", 7)
    early = TraceEvent("gemm", 100.0, 130.0, "0/7", 8)
    calls: dict[int | None, TraceEvent] = {
        7: TraceEvent("cudaLaunchKernel", 900.0, 905.0, "1/1", 7),
        8: TraceEvent("cudaLaunchKernel", -50.0, -45.0, "1/1", 8),
    }
    work = GpuEvents(WINDOW, (early, late), (), (early, late), calls, ())
    assert size_times(work) == {("gemm", ()): SizeTime(1, 10.0, 10.0)}


def test_collectives_wait_and_tell_nothing():
    assert times(kernel("ncclDevKernel_AllReduce", 10)) == {}
