"""The models of GPU that can be simulated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Profile:
    """What a model of GPU can do, from NVIDIA's data sheets; rates in bytes per second."""

    name: str
    architecture: str
    memory_bytes: int
    idle_w: float
    limit_w: float
    limit_min_w: float
    graphics_hz: float
    memory_hz: float
    slowdown_c: float
    pcie_generation: int
    pcie_rate: float
    nvlinks: int
    nvlink_rate: float


PROFILES: Mapping[str, Profile] = {
    "h100": Profile(
        name="NVIDIA H100 80GB HBM3",
        architecture="Hopper",
        memory_bytes=80 * _GIB,
        idle_w=70.0,
        limit_w=700.0,
        limit_min_w=200.0,
        graphics_hz=1.98e9,
        memory_hz=2.619e9,
        slowdown_c=87.0,
        pcie_generation=5,
        pcie_rate=63e9,
        nvlinks=18,
        nvlink_rate=450e9,
    ),
    "a100": Profile(
        name="NVIDIA A100-SXM4-80GB",
        architecture="Ampere",
        memory_bytes=80 * _GIB,
        idle_w=55.0,
        limit_w=400.0,
        limit_min_w=100.0,
        graphics_hz=1.41e9,
        memory_hz=1.593e9,
        slowdown_c=88.0,
        pcie_generation=4,
        pcie_rate=31.5e9,
        nvlinks=12,
        nvlink_rate=300e9,
    ),
    "l4": Profile(
        name="NVIDIA L4",
        architecture="Ada",
        memory_bytes=24 * _GIB,
        idle_w=16.0,
        limit_w=72.0,
        limit_min_w=40.0,
        graphics_hz=2.04e9,
        memory_hz=6.251e9,
        slowdown_c=92.0,
        pcie_generation=4,
        pcie_rate=31.5e9,
        nvlinks=0,
        nvlink_rate=0.0,
    ),
}
