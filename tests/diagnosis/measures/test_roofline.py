"""Peaks of known devices, and what limits a class of kernels."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.diagnosis.timeline import Timeline
from warpwatch_diagnosis.measures.roofline import ClassRoofline, Roofline, peaks_of

# Device, its name here, TFLOP/s in bfloat16 if it has them, GB/s.
PEAKS = Path(__file__).parents[1] / "fixtures" / "peaks.tsv"


@pytest.mark.parametrize("row", PEAKS.read_text().splitlines())
def test_a_devices_name_finds_its_data_sheet(row: str) -> None:
    device, name, tflops, gb_per_s = row.split("\t")
    peaks = peaks_of(device)
    assert peaks is not None
    bfloat16 = peaks.flops_per_s.get("bfloat16")
    assert (peaks.name, bfloat16) == (name, float(tflops) * 1e12 if tflops else None)
    assert peaks.memory_bytes_per_s == float(gb_per_s) * 1e9
    assert "data sheet" in peaks.source or "brief" in peaks.source


@pytest.mark.parametrize("device", [None, "AMD Radeon Graphics", "NVIDIA A1000", "GeForce GTX 1"])
def test_an_unknown_device_has_no_peaks(device: str | None) -> None:
    assert peaks_of(device) is None


def roofline(timeline: Timeline) -> Roofline:
    found = timeline.measured().roofline
    assert found is not None
    return found


def gemm(
    device: str | None,
    m: int,
    k: int,
    n: int,
    kernel: str = "nvjet_gemm",
    dtype: str = "c10::BFloat16",
) -> Timeline:
    timeline = Timeline(device=device)
    arguments = {"Input Dims": [[m, k], [k, n]], "Input type": [dtype] * 2}
    timeline.add("operator", "aten::mm", 0, 100, arguments=arguments)
    timeline.kernel(100, 1_000, launched_us=10, name=kernel)
    timeline.kernel(2_000, 100, launched_us=1_900, name="vectorized_elementwise_kernel")
    return timeline


def of_class(found: Roofline, name: str) -> ClassRoofline:
    return next(c for c in found.classes if c.kernel_class == name)


def test_a_large_product_is_bound_by_compute_and_a_thin_one_by_memory() -> None:
    large = of_class(roofline(gemm("NVIDIA H100 80GB HBM3", 8192, 4096, 4096)), "gemm")
    thin = of_class(roofline(gemm("NVIDIA H100 80GB HBM3", 1, 4096, 4096)), "gemm")
    assert (large.bound, thin.bound) == ("compute", "memory")
    assert large.flops_ratio == pytest.approx(2 * 8192 * 4096 * 4096 / 1e-3 / 989.4e12)
    assert thin.bandwidth_ratio == pytest.approx(2 * (4096 + 4096**2 + 4096) / 1e-3 / 3350e9)


def test_mfu_is_the_ideal_time_of_the_known_flops_by_the_window() -> None:
    found = roofline(gemm("NVIDIA H100 80GB HBM3", 8192, 4096, 4096))
    assert found.flops == 2 * 8192 * 4096 * 4096
    assert found.mfu_ratio == pytest.approx(2 * 8192 * 4096 * 4096 / 989.4e12 / 0.01)


@pytest.mark.parametrize(
    ("kernel", "given", "dtype", "flops_per_s"),
    [
        ("cutlass_80_tensorop_s1688gemm_64x64", "float", "tf32", 156e12),
        ("cutlass_80_tensorop_d884gemm_64x64_16x4_nn", "double", "float64_tensor", 19.5e12),
        ("volta_dgemm_128x64_nn", "double", "float64", 9.7e12),
        ("cutlass_80_tensorop_s1688gemm_64x64", "double", "float64", 9.7e12),
    ],
)
def test_tensor_cores_have_their_own_peak(
    kernel: str, given: str, dtype: str, flops_per_s: float
) -> None:
    found = of_class(roofline(gemm("NVIDIA A100-SXM4-40GB", 512, 512, 512, kernel, given)), "gemm")
    assert found.dtype == dtype
    assert found.flops_ratio == pytest.approx(2 * 512**3 / 1e-3 / flops_per_s)


def test_the_float64_rate_that_no_data_sheet_has_is_unknown() -> None:
    for device in ("NVIDIA H800", "NVIDIA H20", "NVIDIA A10G"):
        peaks = peaks_of(device)
        assert peaks is not None and "float64" not in peaks.flops_per_s


def test_what_is_unknown_is_none_but_elementwise_kernels_are_bound_by_memory() -> None:
    found = roofline(gemm(None, 512, 512, 512))
    assert (found.peaks, found.mfu_ratio) == (None, None)
    known = of_class(found, "gemm")
    assert (known.bound, known.flops_ratio, known.bandwidth_ratio) == (None, None, None)
    assert known.intensity == pytest.approx(512 / 3)
    assert of_class(found, "elementwise").bound == "memory"
