"""What the device could do at best, and what limits each class of kernels.

The roofline: a class of kernels whose FLOP per byte lie below the device's ridge (peak FLOP/s by
peak bytes/s) is limited by memory, above it by arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.intervals import Interval
from warpwatch_diagnosis.measures.kernels import KernelClass
from warpwatch_diagnosis.measures.operators import ClassWork


@dataclass(frozen=True, slots=True)
class Peaks:
    """A GPU's data sheet: dense FLOP/s (no sparsity) by dtype, and bytes/s of its memory."""

    name: str
    flops_per_s: Mapping[str, float]
    memory_bytes_per_s: float
    source: str


@dataclass(frozen=True, slots=True)
class ClassRoofline:
    """One class of kernels against the device's peaks; None where it cannot be known.

    intensity: FLOP per byte of inputs and outputs, each moved once. bound: ``memory`` below the
    ridge of the roofline; classes that compute next to nothing per byte are so by nature.
    flops_ratio: achieved by peak FLOP/s of ``dtype``. bandwidth_ratio: achieved (at least) by peak
    bytes/s.
    """

    kernel_class: KernelClass
    dtype: str | None = None
    flops: float | None = None
    bytes: float | None = None
    intensity: float | None = None
    bound: Literal["memory", "compute"] | None = None
    flops_ratio: float | None = None
    bandwidth_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Roofline:
    """mfu_ratio: model FLOPs of the window (what is computed a second time is none of them) by
    what the devices in use could have done in it."""

    peaks: Peaks | None
    flops: float | None
    mfu_ratio: float | None
    classes: tuple[ClassRoofline, ...]


def _peaks(name: str, memory_gb_per_s: float, source: str, **tera: float) -> Peaks:
    flops_per_s = {dtype: 1e12 * value for dtype, value in tera.items()}
    return Peaks(name, flops_per_s, 1e9 * memory_gb_per_s, source)


def _ampere(name: str, memory_gb_per_s: float) -> Peaks:
    return _peaks(
        name, memory_gb_per_s, "NVIDIA A100 data sheet, June 2021",
        float64=9.7, float64_tensor=19.5, float32=19.5, tf32=156, float16=312, bfloat16=312,
        int8=624,
    )  # fmt: skip


def _hopper(name: str, memory_gb_per_s: float, source: str, **float64: float) -> Peaks:
    return _peaks(
        name, memory_gb_per_s, source, **float64,
        float32=67, tf32=494.7, float16=989.4, bfloat16=989.4, float8=1978.9, int8=1978.9,
    )  # fmt: skip


def _hopper_nvl(name: str, memory_gb_per_s: float, source: str) -> Peaks:
    return _peaks(
        name, memory_gb_per_s, source,
        float64=30, float64_tensor=60, float32=60, tf32=417.5, float16=835.5, bfloat16=835.5,
        float8=1670.5, int8=1670.5,
    )  # fmt: skip


_HOPPER_FLOAT64 = {"float64": 34, "float64_tensor": 67}


# By the device's name, the first that is found in it. Dense rates: where a data sheet quotes
# sparsity, half of it. tf32, float64_tensor: float32 and float64 on tensor cores. An MI250 is two
# devices, each with half. A800 and H800 differ from A100 and H100 in NVLink, H800 in float64 too.
_DEVICES: tuple[tuple[str, Peaks], ...] = (
    (r"\bV100.*PCI", _peaks("V100 PCIe", 900, "NVIDIA V100 data sheet, January 2020",
                          float64=7, float32=14, float16=112)),
    (r"\bV100\b", _peaks("V100 SXM2", 900, "NVIDIA V100 data sheet, January 2020",
                     float64=7.8, float32=15.7, float16=125)),
    (r"\bT4\b", _peaks("T4", 320, "NVIDIA T4 product brief, 2019",
                       float32=8.1, float16=65, int8=130)),
    (r"\bA10\b", _peaks("A10", 600, "NVIDIA A10 data sheet, 2021",
                        float32=31.2, tf32=62.5, float16=125, bfloat16=125, int8=250)),
    (r"\bA10G\b", _peaks("A10G", 600, "NVIDIA A10G data sheet, 2021",
                         float32=31.52, tf32=35, float16=70, bfloat16=70, int8=140)),
    (r"\bA100 PCI.*80|\bA100 80.*PCI", _ampere("A100 80GB PCIe", 1935)),
    (r"\bA100\b.*80", _ampere("A100 80GB SXM", 2039)),
    (r"\bA100\b", _ampere("A100 40GB", 1555)),
    (r"\bA800 PCI.*80|\bA800 80.*PCI", _ampere("A800 80GB PCIe", 1935)),
    (r"\bA800\b.*80", _ampere("A800 80GB SXM", 2039)),
    (r"\bA800\b", _ampere("A800 40GB", 1555)),
    (r"\bL40S\b", _peaks("L40S", 864, "NVIDIA L40S data sheet, 2023",
                         float32=91.6, tf32=183, float16=362, bfloat16=362, float8=733, int8=733)),
    (r"\bL4\b", _peaks("L4", 300, "NVIDIA L4 data sheet, 2023",
                       float32=30.3, tf32=60, float16=121, bfloat16=121, float8=242.5,
                       int8=242.5)),
    (r"\bH100\b.*PCI", _peaks("H100 PCIe", 2000, "NVIDIA H100 data sheet, 2023",
                          float64=26, float64_tensor=51, float32=51, tf32=378, float16=756,
                          bfloat16=756, float8=1513, int8=1513)),
    (r"\bH100\b.*NVL", _hopper_nvl("H100 NVL", 3900, "NVIDIA H100 data sheet, 2024")),
    (r"\bH100\b", _hopper("H100 SXM", 3350, "NVIDIA H100 data sheet, 2023", **_HOPPER_FLOAT64)),
    (r"\bH200\b.*NVL", _hopper_nvl("H200 NVL", 4800, "NVIDIA H200 data sheet, 2024")),
    (r"\bH200\b", _hopper("H200 SXM", 4800, "NVIDIA H200 data sheet, 2024", **_HOPPER_FLOAT64)),
    (r"\bGH200\b.*144", _hopper("GH200 144GB", 4900, "NVIDIA GH200 data sheet, 2024",
                                **_HOPPER_FLOAT64)),
    (r"\bGH200\b", _hopper("GH200 96GB", 4000, "NVIDIA GH200 data sheet, 2023",
                           **_HOPPER_FLOAT64)),
    (r"\bH800\b.*PCI", _peaks("H800 PCIe", 2000, "NVIDIA H800 data sheet, 2023",
                              float32=51, tf32=378, float16=756, bfloat16=756, float8=1513,
                              int8=1513)),
    (r"\bH800\b", _hopper("H800 SXM", 3350, "NVIDIA H800 data sheet, 2023")),
    (r"\bH20\b", _peaks("H20", 4000, "NVIDIA H20 data sheet, 2023",
                        float32=44, tf32=74, float16=148, bfloat16=148, float8=296, int8=296)),
    (r"\bB200\b", _peaks("B200", 8000, "NVIDIA DGX B200 data sheet, 2024",
                         float64=37, float32=75, tf32=1125, float16=2250, bfloat16=2250,
                         float8=4500, int8=4500)),
    (r"\bMI250X", _peaks("MI250X, one die", 1638, "AMD Instinct MI250X data sheet, 2021",
                       float64=23.9, float32=23.9, float16=191.5, bfloat16=191.5, int8=191.5)),
    (r"\bMI250\b", _peaks("MI250, one die", 1638, "AMD Instinct MI250 data sheet, 2021",
                      float64=22.6, float32=22.6, float16=181, bfloat16=181, int8=181)),
    (r"\bMI300X", _peaks("MI300X", 5300, "AMD Instinct MI300X data sheet, 2023",
                       float64=81.7, float32=163.4, tf32=653.7, float16=1307.4, bfloat16=1307.4,
                       float8=2614.9, int8=2614.9)),
)  # fmt: skip
# At most a few FLOP per element that they read or write; every ridge is above 10 FLOP per byte.
MEMORY_CLASSES: frozenset[KernelClass] = frozenset(
    ("elementwise", "copy", "normalization", "softmax", "reduction", "optimizer", "indexing")
)
# By dtype of the inputs: kernels that compute on tensor cores, and the rate that they have there.
_TENSOR_KERNELS = {
    "float32": ("tf32", re.compile(r"tf32|s1688|s16816gemm_f32|xmma.*_tf32")),
    "float64": ("float64_tensor", re.compile(r"_d(884|1684|16816)gemm|f64f64.*tensor")),
}


def peaks_of(device_name: str | None) -> Peaks | None:
    """None for a device that is not in the table."""
    if device_name is None:
        return None
    name = device_name.replace("-", " ")
    return next((p for pattern, p in _DEVICES if re.search(pattern, name, re.IGNORECASE)), None)


def roofline(
    device_name: str | None,
    window: Interval,
    work: Mapping[KernelClass, ClassWork],
    gpu: GpuTime,
) -> Roofline:
    """``work``: of operators with known shapes, on all devices."""
    peaks = peaks_of(device_name)
    # Classes and dtypes that ran on tensor cores, by their kernels' names.
    tensor = {
        (k.kernel_class, dtype)
        for k in gpu.kernel_times
        for dtype, (_, pattern) in _TENSOR_KERNELS.items()
        if pattern.search(k.name)
    }
    classes = [c.kernel_class for c in gpu.class_times]
    rates = {known: _rate(peaks, _dtype(known, w, tensor)) for known, w in work.items()}
    ideal_us = [1e6 * w.model_flops / rate for known, w in work.items() if (rate := rates[known])]
    flops = sum(w.flops for w in work.values())
    available_us = (window[1] - window[0]) * gpu.devices_in_use
    return Roofline(
        peaks=peaks,
        flops=flops or None,
        mfu_ratio=min(1.0, sum(ideal_us) / available_us) if ideal_us and available_us else None,
        classes=tuple(_class(known, work.get(known), peaks, tensor) for known in classes),
    )


def _class(
    kernel_class: KernelClass,
    work: ClassWork | None,
    peaks: Peaks | None,
    tensor: set[tuple[KernelClass, str]],
) -> ClassRoofline:
    if work is None or not work.bytes:
        return ClassRoofline(
            kernel_class, bound="memory" if kernel_class in MEMORY_CLASSES else None
        )
    dtype = _dtype(kernel_class, work, tensor)
    intensity = work.flops / work.bytes
    found = ClassRoofline(kernel_class, dtype, work.flops, work.bytes, intensity)
    rate = _rate(peaks, dtype)
    if peaks is None or rate is None:
        return found
    below_ridge = intensity < rate / peaks.memory_bytes_per_s
    found = replace(found, bound="memory" if below_ridge else "compute")
    seconds = work.gpu_us / 1e6
    if not seconds:
        return found
    return replace(
        found,
        flops_ratio=min(1.0, work.flops / seconds / rate),
        bandwidth_ratio=min(1.0, work.bytes / seconds / peaks.memory_bytes_per_s),
    )


def _dtype(
    kernel_class: KernelClass, work: ClassWork, tensor: set[tuple[KernelClass, str]]
) -> str | None:
    if work.dtype is None or (kernel_class, work.dtype) not in tensor:
        return work.dtype
    return _TENSOR_KERNELS[work.dtype][0]


def _rate(peaks: Peaks | None, dtype: str | None) -> float | None:
    return peaks.flops_per_s.get(dtype) if peaks is not None and dtype is not None else None
