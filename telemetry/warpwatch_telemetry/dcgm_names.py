"""Maps dcgm-exporter's names, types and units to our series.

The rows with ``default`` are the list that dcgm-exporter 4.5 exports without being configured.
DCGM's device fields are in MiB, MHz, mJ and per cent; its profiling fields are ratios.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from warpwatch_telemetry.metric import Kind, SeriesKey, unit_of


@dataclass(frozen=True, slots=True)
class DcgmName:
    """One metric of dcgm-exporter.

    series: our series of the same meaning, all in one unit; several are added up.
    factor: from our unit to theirs.
    decimals: whether DCGM holds it as a floating-point number.
    """

    name: str
    kind: Kind
    help: str
    series: tuple[SeriesKey, ...]
    factor: float = 1.0
    decimals: bool = False
    default: bool = True


# From our unit to that of a device field.
_FACTORS = {"bytes": 1 / 2**20, "hertz": 1e-6, "joules": 1000.0, "ratio": 100.0}
# DCGM divides KiB by 1000 and calls it MB.
_PER_DCGM_MB = 1 / 1024 / 1000


def _device(name: str, help: str, series: str, *own: str, counted: bool = False) -> DcgmName:
    """``counted``: DCGM calls a counter what we do not."""
    kind: Kind = "counter" if counted or series.endswith("_total") else "gauge"
    unit = unit_of(series)
    factor, decimals = _FACTORS.get(unit, 1.0), unit == "watts"
    key = (f"device_{series}", own)
    return DcgmName(f"DCGM_FI_DEV_{name}", kind, help, (key,), factor, decimals)


def _profiling(name: str, help: str, series: str, *own: str) -> DcgmName:
    """Ratios are floating-point numbers, bytes a second are whole ones."""
    key, decimals = (f"device_{series}", own), unit_of(series) == "ratio"
    return DcgmName(f"DCGM_FI_PROF_{name}", "gauge", help, (key,), 1.0, decimals)


XID_ERRORS = DcgmName(
    "DCGM_FI_DEV_XID_ERRORS", "gauge", "The XID that was seen last; 0 for none.", ()
)

_DEFAULT = (
    _device("SM_CLOCK", "SM clock in MHz.", "clock_hertz", "sm"),
    _device("MEM_CLOCK", "Memory clock in MHz.", "clock_hertz", "memory"),
    _device("MEMORY_TEMP", "Memory temperature in C.", "temperature_celsius", "memory"),
    _device("GPU_TEMP", "GPU temperature in C.", "temperature_celsius", "gpu"),
    _device("POWER_USAGE", "Power draw in W.", "power_watts"),
    _device(
        "TOTAL_ENERGY_CONSUMPTION",
        "Energy used since the driver was loaded, in mJ.",
        "energy_joules_total",
    ),
    _device("PCIE_REPLAY_COUNTER", "PCIe retries.", "pcie_replay_total"),
    _device("GPU_UTIL", "GPU utilization in %.", "utilization_ratio"),
    _device("MEM_COPY_UTIL", "Memory utilization in %.", "memory_utilization_ratio"),
    _device("ENC_UTIL", "Encoder utilization in %.", "encoder_utilization_ratio"),
    _device("DEC_UTIL", "Decoder utilization in %.", "decoder_utilization_ratio"),
    XID_ERRORS,
    _device("FB_FREE", "Free memory in MiB.", "memory_free_bytes"),
    _device("FB_USED", "Used memory in MiB.", "memory_used_bytes"),
    _device("FB_RESERVED", "Memory that the driver reserves, in MiB.", "memory_reserved_bytes"),
    # A rate: dcgm-exporter declares it a counter, which makes rate() of it nonsense.
    DcgmName(
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
        "gauge",
        "Data over all NVLinks in both directions, in MB/s.",
        (
            ("device_nvlink_receive_bytes_per_second", ()),
            ("device_nvlink_transmit_bytes_per_second", ()),
        ),
        _PER_DCGM_MB,
    ),
    _device("VGPU_LICENSE_STATUS", "Whether a vGPU license is in use.", "vgpu_licensed"),
    _device(
        "UNCORRECTABLE_REMAPPED_ROWS",
        "Rows remapped for uncorrectable errors.",
        "remapped_rows",
        "uncorrectable",
        counted=True,
    ),
    _device(
        "CORRECTABLE_REMAPPED_ROWS",
        "Rows remapped for correctable errors.",
        "remapped_rows",
        "correctable",
        counted=True,
    ),
    _device("ROW_REMAP_FAILURE", "Whether remapping a row failed.", "row_remap_failure"),
    _profiling(
        "GR_ENGINE_ACTIVE",
        "Share of time in which the graphics engine was active.",
        "graphics_active_ratio",
    ),
    _profiling(
        "PIPE_TENSOR_ACTIVE",
        "Share of cycles in which the tensor pipe was active.",
        "tensor_active_ratio",
    ),
    _profiling(
        "DRAM_ACTIVE",
        "Share of cycles in which device memory was sending or receiving.",
        "dram_active_ratio",
    ),
    _profiling(
        "PCIE_TX_BYTES", "Bytes sent over PCIe in a second.", "pcie_transmit_bytes_per_second"
    ),
    _profiling(
        "PCIE_RX_BYTES", "Bytes received over PCIe in a second.", "pcie_receive_bytes_per_second"
    ),
)

# Not on the default list, but what a GPU without GPM has only from DCGM.
_PROFILING = (
    _profiling("SM_ACTIVE", "Share of SMs that were busy.", "sm_active_ratio"),
    _profiling("SM_OCCUPANCY", "Resident warps, share of the maximum.", "sm_occupancy_ratio"),
    _profiling("PIPE_FP64_ACTIVE", "Use of the FP64 pipe.", "pipe_active_ratio", "fp64"),
    _profiling("PIPE_FP32_ACTIVE", "Use of the FP32 pipe.", "pipe_active_ratio", "fp32"),
    _profiling("PIPE_FP16_ACTIVE", "Use of the FP16 pipe.", "pipe_active_ratio", "fp16"),
    _profiling("NVLINK_TX_BYTES", "Bytes sent.", "nvlink_transmit_bytes_per_second"),
    _profiling("NVLINK_RX_BYTES", "Bytes received.", "nvlink_receive_bytes_per_second"),
    _profiling("PIPE_TENSOR_IMMA_ACTIVE", "Use by IMMA.", "tensor_type_active_ratio", "imma"),
    _profiling("PIPE_TENSOR_HMMA_ACTIVE", "Use by HMMA.", "tensor_type_active_ratio", "hmma"),
    _profiling("PIPE_TENSOR_DFMA_ACTIVE", "Use by DFMA.", "tensor_type_active_ratio", "dfma"),
    _profiling("PIPE_INT_ACTIVE", "Use of the integer pipe.", "pipe_active_ratio", "integer"),
)

# Not on the default list, but often switched on. The *_VIOLATION times are left out: their unit
# differs between releases.
_OFTEN = (
    _device("VIDEO_CLOCK", "In MHz.", "clock_hertz", "video"),
    _device("FB_TOTAL", "In MiB.", "memory_total_bytes"),
    _device("ENFORCED_POWER_LIMIT", "In W.", "power_limit_watts"),
    _device("ECC_SBE_VOL_TOTAL", "Since the driver.", "ecc_errors_total", "corrected"),
    _device("ECC_DBE_VOL_TOTAL", "Since the driver.", "ecc_errors_total", "uncorrected"),
    _device("ECC_SBE_AGG_TOTAL", "In its life.", "ecc_aggregate_errors_total", "corrected"),
    _device("ECC_DBE_AGG_TOTAL", "In its life.", "ecc_aggregate_errors_total", "uncorrected"),
    _device("RETIRED_SBE", "Pages for single bits.", "retired_pages", "single_bit", counted=True),
    _device("RETIRED_DBE", "Pages for double bits.", "retired_pages", "double_bit", counted=True),
    _device("RETIRED_PENDING", "Whether pages wait.", "retired_pages_pending", counted=True),
    _device("NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", "Flit CRC.", "nvlink_errors_total", "crc_flit"),
    _device("NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", "Data CRC.", "nvlink_errors_total", "crc_data"),
    _device("NVLINK_REPLAY_ERROR_COUNT_TOTAL", "Replays.", "nvlink_errors_total", "replay"),
    _device("NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "Recoveries.", "nvlink_errors_total", "recovery"),
)

_NOT_DEFAULT = tuple(replace(row, default=False) for row in _PROFILING + _OFTEN)
# By DCGM's name, in the order of dcgm-exporter's list.
DCGM_NAMES: Mapping[str, DcgmName] = MappingProxyType(
    {row.name: row for row in _DEFAULT + _NOT_DEFAULT}
)
