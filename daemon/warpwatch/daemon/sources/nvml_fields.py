"""What is read through nvmlDeviceGetFieldValues: many values in one call.

Field numbers and units are those of nvml.h 13.5: power in mW, energy in mJ, policy and throttle
times in ns, NVLink throughput in KiB.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from warpwatch.daemon.sources.nvml_library import Meaning, code_of, meaning_of
from warpwatch.telemetry.device_metrics import VIOLATION_POLICIES
from warpwatch.telemetry.metric import SeriesKey
from warpwatch.telemetry.reliability_metrics import ECC_LOCATIONS, PCIE_ERRORS

# As scopeId: the sum over all links.
ALL_LINKS = 0xFFFFFFFF

_MEMBERS = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: "dVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: "uiVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: "ulVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: "ullVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: "sllVal",
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: "siVal",
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: "usVal",
}
# All bits set stands for "not available".
_NOT_AVAILABLE = frozenset({2**32 - 1, 2**64 - 1})


@dataclass(frozen=True, slots=True)
class Field:
    """One field, the series that it fills, and the factor from its unit to theirs.

    ``wraps``: the driver's counter may start over at 2**32.
    """

    number: int
    series: tuple[SeriesKey, ...]
    factor: float = 1
    scope: int = 0
    wraps: bool = False


def _field(
    number: int, name: str, *own: str, factor: float = 1, scope: int = 0, wraps: bool = False
) -> Field:
    return Field(number, ((f"device_{name}", own),), factor, scope, wraps)


def _violations() -> Iterable[Field]:
    also = {"power": "sw_power_cap", "sync_boost": "sync_boost"}
    first = pynvml.NVML_FI_DEV_PERF_POLICY_POWER
    for number, policy in enumerate(VIOLATION_POLICIES, first):
        series: tuple[SeriesKey, ...] = (("device_violation_seconds_total", (policy,)),)
        if policy in also:
            series += (("device_throttle_seconds_total", (also[policy],)),)
        yield Field(number, series, 1e-9)


def _ecc_locations() -> Iterable[Field]:
    first = pynvml.NVML_FI_DEV_ECC_SBE_VOL_L1
    for i, location in enumerate(ECC_LOCATIONS):
        for j, kind in enumerate(("corrected", "uncorrected")):
            yield _field(first + 2 * i + j, "ecc_location_errors_total", kind, location)


_THROTTLE = "throttle_seconds_total"

FAST_FIELDS: tuple[Field, ...] = (
    _field(pynvml.NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION, "energy_joules_total", factor=1e-3),
    _field(pynvml.NVML_FI_DEV_POWER_INSTANT, "power_instant_watts", factor=1e-3),
    _field(pynvml.NVML_FI_DEV_MEMORY_TEMP, "temperature_celsius", "memory"),
    *_violations(),
    _field(
        pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN,
        *(_THROTTLE, "sw_thermal"),
        factor=1e-9,
    ),
    _field(
        pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN,
        *(_THROTTLE, "hw_thermal"),
        factor=1e-9,
    ),
    _field(
        pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN,
        *(_THROTTLE, "hw_power_brake"),
        factor=1e-9,
    ),
    _field(pynvml.NVML_FI_DEV_PCIE_COUNT_RX_BYTES, "pcie_receive_bytes_total", wraps=True),
    _field(pynvml.NVML_FI_DEV_PCIE_COUNT_TX_BYTES, "pcie_transmit_bytes_total", wraps=True),
    _field(pynvml.NVML_FI_DEV_PCIE_REPLAY_COUNTER, "pcie_replay_total"),
    _field(
        pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX,
        "nvlink_receive_bytes_total",
        factor=1024,
        scope=ALL_LINKS,
    ),
    _field(
        pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX,
        "nvlink_transmit_bytes_total",
        factor=1024,
        scope=ALL_LINKS,
    ),
    _field(pynvml.NVML_FI_DEV_ECC_SBE_VOL_TOTAL, "ecc_errors_total", "corrected"),
    _field(pynvml.NVML_FI_DEV_ECC_DBE_VOL_TOTAL, "ecc_errors_total", "uncorrected"),
)

SLOW_FIELDS: tuple[Field, ...] = (
    _field(pynvml.NVML_FI_DEV_ECC_CURRENT, "ecc_mode"),
    _field(pynvml.NVML_FI_DEV_ECC_SBE_AGG_TOTAL, "ecc_aggregate_errors_total", "corrected"),
    _field(pynvml.NVML_FI_DEV_ECC_DBE_AGG_TOTAL, "ecc_aggregate_errors_total", "uncorrected"),
    *_ecc_locations(),
    _field(pynvml.NVML_FI_DEV_RETIRED_SBE, "retired_pages", "single_bit"),
    _field(pynvml.NVML_FI_DEV_RETIRED_DBE, "retired_pages", "double_bit"),
    _field(pynvml.NVML_FI_DEV_RETIRED_PENDING, "retired_pages_pending"),
    _field(pynvml.NVML_FI_DEV_REMAPPED_COR, "remapped_rows", "correctable"),
    _field(pynvml.NVML_FI_DEV_REMAPPED_UNC, "remapped_rows", "uncorrectable"),
    _field(pynvml.NVML_FI_DEV_REMAPPED_PENDING, "row_remap_pending"),
    _field(pynvml.NVML_FI_DEV_REMAPPED_FAILURE, "row_remap_failure"),
    _field(pynvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, "recovery_action"),
    _field(pynvml.NVML_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL, "nvlink_errors_total", "crc_flit"),
    _field(pynvml.NVML_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL, "nvlink_errors_total", "crc_data"),
    _field(pynvml.NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL, "nvlink_errors_total", "replay"),
    _field(pynvml.NVML_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL, "nvlink_errors_total", "recovery"),
    _field(pynvml.NVML_FI_DEV_POWER_MIN_LIMIT, "power_limit_min_watts", factor=1e-3),
    _field(pynvml.NVML_FI_DEV_POWER_MAX_LIMIT, "power_limit_max_watts", factor=1e-3),
    _field(pynvml.NVML_FI_DEV_POWER_DEFAULT_LIMIT, "power_limit_default_watts", factor=1e-3),
    *(
        _field(pynvml.NVML_FI_DEV_PCIE_COUNT_CORRECTABLE_ERRORS + i, "pcie_errors_total", error)
        for i, error in enumerate(PCIE_ERRORS)
    ),
)


class FieldReader:
    """Reads a set of fields of one device in one call, without those it does not support."""

    def __init__(self, fields: Sequence[Field]) -> None:
        self._fields = list(fields)
        self._raw: dict[int, float] = {}
        self._wrapped: dict[int, float] = {}

    def __call__(self, handle: Any) -> dict[SeriesKey, float]:
        """Raises NVMLError when the device does not answer at all."""
        values: dict[SeriesKey, float] = {}
        unsupported: list[Field] = []
        for field, answer in self._ask(handle, self._fields):
            if answer is None or meaning_of(answer.nvmlReturn) is Meaning.UNSUPPORTED:
                unsupported.append(field)
            elif answer.nvmlReturn == pynvml.NVML_SUCCESS:
                value = self._value(field, answer)
                if value is not None:
                    values |= dict.fromkeys(field.series, value)
            elif meaning_of(answer.nvmlReturn) in (Meaning.LOST, Meaning.RESET_REQUIRED):
                raise pynvml.NVMLError(answer.nvmlReturn)
        for field in unsupported:
            self._fields.remove(field)
        return values

    def _ask(self, handle: Any, fields: list[Field]) -> list[tuple[Field, Any]]:
        """Field and answer; None where an older driver refuses a call that names the field."""
        if not fields:
            return []
        try:
            answers = pynvml.nvmlDeviceGetFieldValues(handle, [(f.number, f.scope) for f in fields])
        except pynvml.NVMLError as error:
            if meaning_of(code_of(error)) is not Meaning.UNSUPPORTED:
                raise
            if len(fields) == 1:
                return [(fields[0], None)]
            half = len(fields) // 2
            return self._ask(handle, fields[:half]) + self._ask(handle, fields[half:])
        return list(zip(fields, answers, strict=True))

    def _value(self, field: Field, answer: Any) -> float | None:
        member = _MEMBERS.get(answer.valueType)
        raw: float | None = getattr(answer.value, member) if member else None
        if raw is None or raw in _NOT_AVAILABLE or not math.isfinite(raw):
            return None
        if field.wraps:
            previous = self._raw.get(field.number, 0)
            if raw < previous < 2**32:
                self._wrapped[field.number] = self._wrapped.get(field.number, 0) + 2**32
            self._raw[field.number] = raw
            raw += self._wrapped.get(field.number, 0)
        return raw if field.factor == 1 else round(raw * field.factor, 6)
