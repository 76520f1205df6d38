"""The table of what is read through nvmlDeviceGetFieldValues: many values in one call.

Field numbers and units are those of nvml.h 13.5: power in mW, energy in mJ, policy and throttle
times in ns, NVLink throughput in KiB. There are three batches, by how often their values change.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import pynvml

from warpwatch_telemetry.label_values import ECC_LOCATIONS, PCIE_ERRORS, VIOLATION_POLICIES
from warpwatch_telemetry.metric import SeriesKey

# As scopeId: the sum over all links.
ALL_LINKS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Field:
    """One field, the series that it fills, and how its value becomes theirs.

    factor, divisor: from the field's unit to the series'; a plain field has no factor, the others
    have no divisor.
    rate: the series of its growth per second, by the driver's own timestamps.
    adds: the series is the sum of several fields.
    flag: whatever is not 0 is 1.
    instead_of: it is read only where the device does not support the field of this number.
    """

    number: int
    series: tuple[SeriesKey, ...]
    factor: int = 1
    divisor: int = 1
    scope: int = 0
    rate: SeriesKey | None = None
    adds: bool = False
    flag: bool = False
    instead_of: int = 0

    @property
    def plain(self) -> bool:
        """Whether a reading needs at most to be divided."""
        return self.factor == 1 and not (self.rate or self.adds or self.flag or self.instead_of)


def _field(number: int, name: str, *own: str, divisor: int = 1) -> Field:
    return Field(number, ((f"device_{name}", own),), divisor=divisor)


def _milli(number: int, name: str, *own: str) -> Field:
    return _field(number, name, *own, divisor=1000)


def _violations() -> Iterable[Field]:
    also = {"power": "sw_power_cap", "sync_boost": "sync_boost"}
    first = pynvml.NVML_FI_DEV_PERF_POLICY_POWER
    for number, policy in enumerate(VIOLATION_POLICIES, first):
        series: tuple[SeriesKey, ...] = (("device_violation_seconds_total", (policy,)),)
        if policy in also:
            series += (("device_throttle_seconds_total", (also[policy],)),)
        yield Field(number, series, divisor=10**9)


def _throttled(number: int, reason: str) -> Field:
    return _field(number, "throttle_seconds_total", reason, divisor=10**9)


def _pcie_bytes(number: int, direction: str) -> Field:
    """Of 32 or 64 bits: what they have counted is found out by PcieBytes."""
    return _field(number, f"pcie_{direction}_bytes_total")


def _nvlink_bytes(number: int, direction: str) -> Field:
    name = f"device_nvlink_{direction}_bytes"
    rate: SeriesKey = (f"{name}_per_second", ())
    return Field(number, ((f"{name}_total", ()),), factor=1024, scope=ALL_LINKS, rate=rate)


def _ecc_locations() -> Iterable[Field]:
    first = pynvml.NVML_FI_DEV_ECC_SBE_VOL_L1
    for i, location in enumerate(ECC_LOCATIONS):
        for j, kind in enumerate(("corrected", "uncorrected")):
            yield _field(first + 2 * i + j, "ecc_location_errors_total", kind, location)


_NVLINK_ERRORS = {
    "crc_flit": pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL,
    "crc_data": pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL,
    "replay": pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL,
    "recovery": pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL,
}
# NVLink 5 (Blackwell) counts errors by packets and by link, and no longer those above.
_NVLINK5_ERRORS = {
    "receive": pynvml.NVML_FI_DEV_NVLINK_COUNT_RCV_ERRORS,
    "recovery": pynvml.NVML_FI_DEV_NVLINK_COUNT_LINK_RECOVERY_EVENTS,
}
_NVLINKS = range(pynvml.NVML_NVLINK_MAX_LINKS)


def _nvlinks() -> Iterable[Field]:
    for link in _NVLINKS:
        state: SeriesKey = ("device_nvlink_link_up", (str(link),))
        yield Field(pynvml.NVML_FI_DEV_NVLINK_GET_STATE, (state,), scope=link, flag=True)
    for kind, number in _NVLINK_ERRORS.items():
        yield _field(number, "nvlink_errors_total", kind)
    old = _NVLINK_ERRORS["recovery"]
    for kind, number in _NVLINK5_ERRORS.items():
        series: SeriesKey = ("device_nvlink_errors_total", (kind,))
        for link in _NVLINKS:
            yield Field(number, (series,), scope=link, adds=True, instead_of=old)


# The times of these reasons have numbers of their own, which moved: drivers from 575 on had them
# at 251, where others have power smoothing, until 580.82 put them at 269 (nvml.h of each).
_COUNTED_REASONS = ("sw_thermal", "hw_thermal", "hw_power_brake")
_FIRST_REASON, _FIRST_REASON_BEFORE = 269, 251
_MOVED_SINCE, _MOVED_UNTIL = (575, 0), (580, 82)


def fast_fields(driver_version: str) -> tuple[Field, ...]:
    """What moves, numbered as a driver of this version (such as 580.95.05) does."""
    numbers = [int(part) for part in driver_version.split(".") if part.isdecimal()]
    moved = _MOVED_SINCE <= tuple(numbers[:2]) < _MOVED_UNTIL
    first = _FIRST_REASON_BEFORE if moved else _FIRST_REASON
    reasons = (_throttled(number, reason) for number, reason in enumerate(_COUNTED_REASONS, first))
    return (*_FAST_FIELDS, *reasons)


_FAST_FIELDS: tuple[Field, ...] = (
    _milli(pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, "energy_joules_total"),
    _milli(pynvml.NVML_FI_DEV_POWER_AVERAGE, "power_watts"),
    _milli(pynvml.NVML_FI_DEV_POWER_INSTANT, "power_instant_watts"),
    _field(pynvml.NVML_FI_DEV_MEMORY_TEMP, "temperature_celsius", "memory"),
    *_violations(),
    _pcie_bytes(pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, "receive"),
    _pcie_bytes(pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, "transmit"),
    _nvlink_bytes(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, "receive"),
    _nvlink_bytes(pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, "transmit"),
)

SLOW_FIELDS: tuple[Field, ...] = (
    _field(pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, "ecc_errors_total", "corrected"),
    _field(pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, "ecc_errors_total", "uncorrected"),
    _field(pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, "pcie_replay_total"),
    *(
        _field(pynvml.NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS + i, "pcie_errors_total", error)
        for i, error in enumerate(PCIE_ERRORS)
    ),
    _field(pynvml.NVML_FI_DEV_REMAPPED_COR, "remapped_rows", "correctable"),
    _field(pynvml.NVML_FI_DEV_REMAPPED_UNC, "remapped_rows", "uncorrectable"),
    _field(pynvml.NVML_FI_DEV_REMAPPED_PENDING, "row_remap_pending"),
    _field(pynvml.NVML_FI_DEV_REMAPPED_FAILURE, "row_remap_failure"),
    _field(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, "recovery_action"),
    _milli(pynvml.NVML_FI_DEV_POWER_CURRENT_LIMIT, "power_limit_watts"),
    *_nvlinks(),
)

RARE_FIELDS: tuple[Field, ...] = (
    _field(pynvml.NVML_FI_DEV_ECC_CURRENT, "ecc_mode"),
    _field(pynvml.NVML_FI_DEV_ECC_SBE_AGG_TOTAL, "ecc_aggregate_errors_total", "corrected"),
    _field(pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL, "ecc_aggregate_errors_total", "uncorrected"),
    *_ecc_locations(),
    _field(pynvml.NVML_FI_DEV_RETIRED_SBE, "retired_pages", "single_bit"),
    _field(pynvml.NVML_FI_DEV_RETIRED_DBE, "retired_pages", "double_bit"),
    _field(pynvml.NVML_FI_DEV_RETIRED_PENDING, "retired_pages_pending"),
    _milli(pynvml.NVML_FI_DEV_POWER_MIN_LIMIT, "power_limit_min_watts"),
    _milli(pynvml.NVML_FI_DEV_POWER_MAX_LIMIT, "power_limit_max_watts"),
    _milli(pynvml.NVML_FI_DEV_POWER_DEFAULT_LIMIT, "power_limit_default_watts"),
    *(
        _field(number, "temperature_margin_threshold_celsius", name)
        for name, number in (
            ("shutdown", pynvml.NVML_FI_DEV_TEMPERATURE_SHUTDOWN_TLIMIT),
            ("slowdown", pynvml.NVML_FI_DEV_TEMPERATURE_SLOWDOWN_TLIMIT),
            ("memory_max", pynvml.NVML_FI_DEV_TEMPERATURE_MEM_MAX_TLIMIT),
            ("gpu_max", pynvml.NVML_FI_DEV_TEMPERATURE_GPU_MAX_TLIMIT),
        )
    ),
)
