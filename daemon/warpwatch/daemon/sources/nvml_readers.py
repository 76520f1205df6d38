"""The table of what is asked of a device through NVML's own calls: a row is a metric's reader.

Each function takes a device handle, makes as few calls as it can and returns series in base units.
They raise NVMLError; what that means is decided in one place, by the device that runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from warpwatch.daemon.sources.nvml_fields import FAST_FIELDS, SLOW_FIELDS, FieldReader
from warpwatch.telemetry.device_metrics import THROTTLE_REASONS
from warpwatch.telemetry.metric import SeriesKey
from warpwatch.telemetry.samples import DeviceProcess

Values = dict[SeriesKey, float]

# Rounds between two readings of what seldom changes.
SLOW_ROUNDS = 10
_MHZ = 1_000_000
_CLOCKS = {
    "graphics": pynvml.NVML_CLOCK_GRAPHICS,
    "sm": pynvml.NVML_CLOCK_SM,
    "memory": pynvml.NVML_CLOCK_MEM,
    "video": pynvml.NVML_CLOCK_VIDEO,
}
_THRESHOLDS = {
    "shutdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SHUTDOWN,
    "slowdown": pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN,
    "memory_max": pynvml.NVML_TEMPERATURE_THRESHOLD_MEM_MAX,
    "gpu_max": pynvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX,
}


@dataclass(slots=True)
class Reader:
    """``read`` is called in every ``rounds``-th round; between, its values stand; 0: only once."""

    name: str
    read: Callable[[Any], Values]
    rounds: int = 1


def device_readers() -> list[Reader]:
    """A fresh set for one device: some of them remember what they read before."""
    return [
        Reader("utilization", _utilization),
        Reader("memory", _memory),
        Reader("power", _power),
        Reader("temperature", _temperature),
        Reader("throttle", _throttle),
        Reader("clock_sm", _clock("sm")),
        Reader("clock_graphics", _clock("graphics")),
        Reader("clock_memory", _clock("memory")),
        Reader("fields", FieldReader(FAST_FIELDS)),
        Reader("slow_fields", FieldReader(SLOW_FIELDS), SLOW_ROUNDS),
        Reader("clock_video", _clock("video"), SLOW_ROUNDS),
        Reader("power_limit", _power_limit, SLOW_ROUNDS),
        Reader("temperature_margin", _temperature_margin, SLOW_ROUNDS),
        Reader("performance_state", _performance_state, SLOW_ROUNDS),
        Reader("bar1", _bar1, SLOW_ROUNDS),
        Reader("encoder", _encoder, SLOW_ROUNDS),
        Reader("decoder", _decoder, SLOW_ROUNDS),
        Reader("pcie_link", _pcie_link, SLOW_ROUNDS),
        Reader("row_remap_banks", _row_remap_banks, SLOW_ROUNDS),
        Reader("persistence_mode", _persistence_mode, SLOW_ROUNDS),
        Reader("compute_mode", _compute_mode, SLOW_ROUNDS),
        Reader("mig_mode", _mig_mode, SLOW_ROUNDS),
        Reader("pcie_link_max", _pcie_link_max, 0),
        *(Reader(f"clock_max_{domain}", _clock_max(domain), 0) for domain in _CLOCKS),
        *(Reader(f"threshold_{name}", _threshold(name), 0) for name in _THRESHOLDS),
    ]


def _one(name: str, value: float) -> Values:
    return {(f"device_{name}", ()): value}


def _utilization(handle: Any) -> Values:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return {
        ("device_utilization_ratio", ()): rates.gpu / 100,
        ("device_memory_utilization_ratio", ()): rates.memory / 100,
    }


def _memory(handle: Any) -> Values:
    info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    return {
        ("device_memory_used_bytes", ()): info.used,
        ("device_memory_free_bytes", ()): info.free,
        ("device_memory_total_bytes", ()): info.total,
        ("device_memory_reserved_bytes", ()): info.reserved,
    }


def _power(handle: Any) -> Values:
    return _one("power_watts", pynvml.nvmlDeviceGetPowerUsage(handle) / 1000)


def _power_limit(handle: Any) -> Values:
    return _one("power_limit_watts", pynvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000)


def _temperature(handle: Any) -> Values:
    """Drivers older than the versioned call have only the one that goes away with CUDA 14."""
    try:
        celsius = pynvml.nvmlDeviceGetTemperatureV(handle, pynvml.NVML_TEMPERATURE_GPU)
    except (
        pynvml.NVMLError_FunctionNotFound,
        pynvml.NVMLError_ArgumentVersionMismatch,
        pynvml.NVMLError_NotSupported,
    ):
        celsius = pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)
    return {("device_temperature_celsius", ("gpu",)): celsius}


def _temperature_margin(handle: Any) -> Values:
    return _one("temperature_margin_celsius", pynvml.nvmlDeviceGetMarginTemperature(handle))


def _threshold(name: str) -> Callable[[Any], Values]:
    def read(handle: Any) -> Values:
        celsius = pynvml.nvmlDeviceGetTemperatureThreshold(handle, _THRESHOLDS[name])
        return {("device_temperature_threshold_celsius", (name,)): celsius}

    return read


def _throttle(handle: Any) -> Values:
    """The bits in the order of THROTTLE_REASONS; older drivers call them throttle reasons."""
    try:
        bits = pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except pynvml.NVMLError_FunctionNotFound:
        bits = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {
        ("device_throttle_active", (reason,)): bits >> bit & 1
        for bit, reason in enumerate(THROTTLE_REASONS)
    }


def _clock(domain: str) -> Callable[[Any], Values]:
    def read(handle: Any) -> Values:
        megahertz = pynvml.nvmlDeviceGetClockInfo(handle, _CLOCKS[domain])
        return {("device_clock_hertz", (domain,)): megahertz * _MHZ}

    return read


def _clock_max(domain: str) -> Callable[[Any], Values]:
    def read(handle: Any) -> Values:
        megahertz = pynvml.nvmlDeviceGetMaxClockInfo(handle, _CLOCKS[domain])
        return {("device_clock_max_hertz", (domain,)): megahertz * _MHZ}

    return read


def _performance_state(handle: Any) -> Values:
    state = pynvml.nvmlDeviceGetPerformanceState(handle)
    return {} if state == pynvml.NVML_PSTATE_UNKNOWN else _one("performance_state", state)


def _bar1(handle: Any) -> Values:
    info = pynvml.nvmlDeviceGetBAR1MemoryInfo(handle)
    return {
        ("device_bar1_memory_used_bytes", ()): info.bar1Used,
        ("device_bar1_memory_free_bytes", ()): info.bar1Free,
        ("device_bar1_memory_total_bytes", ()): info.bar1Total,
    }


def _encoder(handle: Any) -> Values:
    per_cent, _ = pynvml.nvmlDeviceGetEncoderUtilization(handle)
    return _one("encoder_utilization_ratio", per_cent / 100)


def _decoder(handle: Any) -> Values:
    per_cent, _ = pynvml.nvmlDeviceGetDecoderUtilization(handle)
    return _one("decoder_utilization_ratio", per_cent / 100)


def _pcie_link(handle: Any) -> Values:
    return {
        ("device_pcie_link_generation", ()): pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle),
        ("device_pcie_link_width_lanes", ()): pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle),
    }


def _pcie_link_max(handle: Any) -> Values:
    return {
        ("device_pcie_link_generation_max", ()): pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle),
        ("device_pcie_link_width_max_lanes", ()): pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle),
    }


def _row_remap_banks(handle: Any) -> Values:
    banks = pynvml.nvmlDeviceGetRowRemapperHistogram(handle)
    return {
        ("device_row_remap_banks", (name,)): getattr(banks, name)
        for name in ("max", "high", "partial", "low", "none")
    }


def _persistence_mode(handle: Any) -> Values:
    return _one("persistence_mode", pynvml.nvmlDeviceGetPersistenceMode(handle))


def _compute_mode(handle: Any) -> Values:
    return _one("compute_mode", pynvml.nvmlDeviceGetComputeMode(handle))


def _mig_mode(handle: Any) -> Values:
    current, _ = pynvml.nvmlDeviceGetMigMode(handle)
    return _one("mig_mode", current)


def read_processes(handle: Any) -> tuple[DeviceProcess, ...]:
    """Processes with memory on the device; one whose memory is not known is left out."""
    return tuple(
        DeviceProcess(process.pid, _executable(process.pid), process.usedGpuMemory)
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if process.usedGpuMemory is not None
    )


def _executable(pid: int) -> str:
    """The kernel's name of a process; empty where its PID is of a namespace not seen here."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


# What describes a device and is read once, by its label in warpwatch_device_info.
_ARCHITECTURES = {
    pynvml.NVML_DEVICE_ARCH_KEPLER: "Kepler",
    pynvml.NVML_DEVICE_ARCH_MAXWELL: "Maxwell",
    pynvml.NVML_DEVICE_ARCH_PASCAL: "Pascal",
    pynvml.NVML_DEVICE_ARCH_VOLTA: "Volta",
    pynvml.NVML_DEVICE_ARCH_TURING: "Turing",
    pynvml.NVML_DEVICE_ARCH_AMPERE: "Ampere",
    pynvml.NVML_DEVICE_ARCH_ADA: "Ada",
    pynvml.NVML_DEVICE_ARCH_HOPPER: "Hopper",
    pynvml.NVML_DEVICE_ARCH_BLACKWELL: "Blackwell",
}
_FACTS: dict[str, Callable[[Any], str]] = {
    "driver_version": lambda handle: pynvml.nvmlSystemGetDriverVersion(),
    "pci_bus_id": lambda handle: pynvml.nvmlDeviceGetPciInfo_v3(handle).busId,
    "vbios_version": lambda handle: pynvml.nvmlDeviceGetVbiosVersion(handle),
    "serial": lambda handle: pynvml.nvmlDeviceGetSerial(handle),
    "architecture": lambda handle: _ARCHITECTURES.get(pynvml.nvmlDeviceGetArchitecture(handle), ""),
}


def read_facts(handle: Any) -> dict[str, str]:
    """What the device tells of itself; what it does not tell is left out."""
    facts: dict[str, str] = {}
    for name, read in _FACTS.items():
        try:
            text = str(read(handle))
        except (
            pynvml.NVMLError_NotSupported,
            pynvml.NVMLError_FunctionNotFound,
            pynvml.NVMLError_NoPermission,
            pynvml.NVMLError_Unknown,
            UnicodeDecodeError,
        ):
            continue
        if text:
            facts[name] = text
    return facts
