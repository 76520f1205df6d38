"""Compares each class of kernels with the peaks of the device.

The roofline: a class of kernels whose FLOP per byte lie below the device's ridge (peak FLOP/s by
peak bytes/s) is limited by memory, above it by arithmetic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from warpwatch_diagnosis.intervals import Interval
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.gpu_work import KernelClass
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
    """One class of kernels against the device's peaks; unknown fields are None.

    intensity: FLOP per byte of inputs and outputs, each moved once. bound: ``memory`` below the
    ridge, and for classes that hardly compute. flops_ratio: achieved by peak FLOP/s of ``dtype``.
    bandwidth_ratio: achieved (at least) by peak bytes/s.
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
    """The roofline of one trace; ``mfu_ratio``: model FLOPs by the peak of the devices in use."""

    peaks: Peaks | None
    flops: float | None
    mfu_ratio: float | None
    classes: tuple[ClassRoofline, ...]


def _read_peaks() -> Iterator[tuple[str, Peaks]]:
    """Yield the pattern of a device's name and its data sheet; the first match counts."""
    heads, *rows = Path(__file__).with_name("device_peaks.tsv").read_text().splitlines()
    dtypes = heads.split("\t")[3:-1]
    for row in rows:
        pattern, name, gb_per_s, *rates, source = row.split("\t")
        known = zip(dtypes, rates, strict=True)
        flops_per_s = {dtype: 1e12 * float(rate) for dtype, rate in known if rate != "-"}
        yield pattern, Peaks(name, flops_per_s, 1e9 * float(gb_per_s), source)


# Dense TFLOP/s: half of a rate that is quoted with sparsity. tf32, float64_tensor: float32 and
# float64 on tensor cores. An MI250 is two devices, each with half. A800 and H800 differ from A100
# and H100 in NVLink, H800 in float64, too.
_DEVICES = tuple(_read_peaks())
# These compute at most a few FLOP per element; every ridge is above 10 FLOP per byte.
MEMORY_CLASSES: frozenset[KernelClass] = frozenset(
    ("elementwise", "copy", "normalization", "softmax", "reduction", "optimizer", "indexing")
)
# By dtype of the inputs: the rate on tensor cores, and the kernels that compute there.
_TENSOR_KERNELS = {
    "float32": ("tf32", re.compile(r"tf32|s1688|s16816gemm_f32|xmma.*_tf32")),
    "float64": ("float64_tensor", re.compile(r"_d(884|1684|16816)gemm|f64f64.*tensor")),
}


def peaks_of(device_name: str | None) -> Peaks | None:
    """Return the peaks of a device, or None if it is not in the table or a part of a GPU."""
    if device_name is None or " MIG " in device_name:
        return None
    name = device_name.replace("-", " ")
    return next((p for pattern, p in _DEVICES if re.search(pattern, name, re.IGNORECASE)), None)


def roofline(
    device_name: str | None, window: Interval, work: Mapping[KernelClass, ClassWork], gpu: GpuTime
) -> Roofline:
    """Compare with the peaks; ``work`` has the operators with known shapes, on all devices."""
    peaks = peaks_of(device_name)
    # The names of kernels show the classes and dtypes that ran on tensor cores.
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
