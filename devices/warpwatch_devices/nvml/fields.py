"""Reads many values in one call of nvmlDeviceGetFieldValues: the fields and their batches.

Field numbers and units are those of nvml.h 13.5: power in mW, energy in mJ, policy and throttle
times in ns, NVLink throughput in KiB. There are three batches, by how often their values change.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pynvml

from warpwatch_devices.nvml.library import Meaning, function, meaning_of
from warpwatch_telemetry.catalogue import ECC_LOCATIONS, PCIE_ERRORS, VIOLATION_POLICIES
from warpwatch_telemetry.metric import SeriesKey, Values


@dataclass(slots=True, eq=False)
class TimedReader:
    """A reader that runs every ``period_s`` seconds; 0 means every round.

    ``name`` is its label in nvml_calls_total; readers of the same kind share one. With
    ``instead_of`` it runs only on devices that lack this field. ``calls`` and ``refusals`` (return
    codes of single values) are those of the last reading.
    """

    name: str
    read: Callable[[Any], Values]
    period_s: float = 0.0
    instead_of: int = 0
    calls: int = 1
    refusals: Sequence[int] = ()


# As scopeId: the sum over all links.
ALL_LINKS = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Field:
    """One field, the series that it fills, and the conversion of its value.

    ``factor`` and ``divisor`` convert from the field's unit to the series'; a plain field has no
    factor, the others have no divisor. ``rate``: the series of its growth per second, by the
    driver's timestamps. ``adds``: the series is the sum of several fields. ``flag``: any value but
    0 becomes 1. ``instead_of``: the field is read only if the device lacks the field of this
    number.
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
    """Return a counter of 32 or 64 bits; PcieBytes interprets it."""
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


# The times of these reasons have numbers that moved: drivers from 575 on had them at 251, where
# others have power smoothing. 580.82 moved them to 269 (nvml.h of each).
_COUNTED_REASONS = ("sw_thermal", "hw_thermal", "hw_power_brake")
_FIRST_REASON, _FIRST_REASON_BEFORE = 269, 251
_MOVED_SINCE, _MOVED_UNTIL = (575, 0), (580, 82)


def fast_fields(driver_version: str) -> tuple[Field, ...]:
    """Return the fields of every round, with the numbers of this driver version (580.95.05)."""
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


# nvmlFieldValue_t: fieldId, scopeId, timestamp (µs), latencyUsec, valueType, nvmlReturn, value.
_ANSWER = struct.Struct("=IIqqIIQ")
# Codes of a single field that concern the whole device.
_OF_THE_DEVICE = (Meaning.LIBRARY, Meaning.LOST, Meaning.RESET_REQUIRED)
_FINAL = (Meaning.UNSUPPORTED, Meaning.NO_PERMISSION)

# The newest value of each field of a sum; it outlives the batches.
Parts = dict[Field, float]


def _double(raw: int) -> float | None:
    value: float = struct.unpack("=d", raw.to_bytes(8, "little"))[0]
    return value if math.isfinite(value) else None


def _unsigned(bits: int) -> Callable[[int], float | None]:
    """Return a decoder; all ones of the type's width mean "not available"."""
    ones = (1 << bits) - 1

    def decode(raw: int) -> float | None:
        value = raw & ones
        return None if value == ones else value

    return decode


def _signed(bits: int) -> Callable[[int], float | None]:
    """Return a decoder; -1 is a value: a margin below its threshold."""
    sign = 1 << bits - 1

    def decode(raw: int) -> float | None:
        value = raw & (sign << 1) - 1
        return value - (sign << 1) if value & sign else value

    return decode


_DECODERS: dict[int, Callable[[int], float | None]] = {
    pynvml.NVML_VALUE_TYPE_DOUBLE: _double,
    pynvml.NVML_VALUE_TYPE_UNSIGNED_INT: _unsigned(32),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG: _unsigned(64),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG: _unsigned(64),
    pynvml.NVML_VALUE_TYPE_SIGNED_LONG_LONG: _signed(64),
    pynvml.NVML_VALUE_TYPE_SIGNED_INT: _signed(32),
    pynvml.NVML_VALUE_TYPE_UNSIGNED_SHORT: _unsigned(16),
}


class GrowthRate:
    """A counter's growth per second between two readings of the driver's."""

    def __init__(self) -> None:
        self._newest: tuple[float, int] | None = None

    def per_second(self, value: float, time_us: int) -> float | None:
        """Return the growth, or None at first, for a repeated reading and after a restart."""
        before, self._newest = self._newest, (value, time_us)
        if before is None or time_us <= before[1] or value < before[0]:
            return None
        return (value - before[0]) * 1e6 / (time_us - before[1])


class FieldBatch:
    """Some fields of one device, which ``reader`` reads in one call.

    Fields whose number is unsupported, on all links, are left out: ``unsupported`` has these
    numbers. ``parts`` keeps the last value of each link while the link does not reply.
    """

    def __init__(
        self,
        name: str,
        fields: Sequence[Field],
        period_s: float = 0.0,
        parts: Parts | None = None,
    ) -> None:
        self.reader = TimedReader(name, self.read, period_s)
        self.answered: set[int] = set()
        self.unsupported: set[int] = set()
        self._parts: Parts = {} if parts is None else parts
        self._rates = {f.number: GrowthRate() for f in fields if f.rate}
        self._keep(fields)

    def _keep(self, fields: Sequence[Field]) -> None:
        self._fields = tuple(fields)
        unanswered = pynvml.NVML_ERROR_UNKNOWN
        self._template = b"".join(
            _ANSWER.pack(f.number, f.scope, 0, 0, 0, unanswered, 0) for f in fields
        )
        self._answers = bytearray(self._template)
        # NVML writes through this pointer into the bytes that are unpacked.
        self._pointer = (ctypes.c_char * len(self._answers)).from_buffer(self._answers)

    def read(self, handle: Any) -> Values:
        """Read all fields. Raises NVMLError if no field has a value or the device is gone."""
        if not self._fields:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self.reader.calls = 1
        self._answers[:] = self._template
        code = self._call(handle, 0, len(self._fields))
        if meaning_of(code) is Meaning.UNSUPPORTED:
            self._read_one_by_one(handle)
        elif code != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(code)
        values: Values = {}
        failures: dict[Field, int] = {}
        for field, (_, _, time_us, _, kind, code, raw) in zip(
            self._fields, _ANSWER.iter_unpack(self._answers), strict=True
        ):
            if code != pynvml.NVML_SUCCESS:
                failures[field] = code
                continue
            value = _DECODERS[kind](raw) if kind in _DECODERS else None
            if value is None:
                continue
            if not field.plain:
                self._add(field, value, time_us, values)
                continue
            for key in field.series:
                values[key] = value if field.divisor == 1 else value / field.divisor
        self._settle(failures)
        self._sum(values)
        return values

    def _call(self, handle: Any, first: int, number: int) -> int:
        """Read ``number`` fields from the one in place ``first``; return the code of the call."""
        pointer = ctypes.byref(self._pointer, first * _ANSWER.size)
        return function("nvmlDeviceGetFieldValues")(handle, number, pointer)

    def _read_one_by_one(self, handle: Any) -> None:
        """Read each field by itself, as an old driver refuses a whole batch for one field."""
        self.reader.calls += len(self._fields)
        for place, one in enumerate(self._fields):
            code = self._call(handle, place, 1)
            if meaning_of(code) is Meaning.UNSUPPORTED:
                refused = (one.number, one.scope, 0, 0, 0, code, 0)
                _ANSWER.pack_into(self._answers, place * _ANSWER.size, *refused)
            elif code != pynvml.NVML_SUCCESS:
                raise pynvml.NVMLError(code)

    def _add(self, field: Field, value: float, time_us: int, values: Values) -> None:
        if field.instead_of and field.instead_of not in self.unsupported:
            return
        if field.flag:
            value = 1 if value else 0
        value *= field.factor
        if field.adds:
            self._parts[field] = value
            return
        for key in field.series:
            values[key] = value
        if field.rate is not None:
            per_second = self._rates[field.number].per_second(value, time_us)
            if per_second is not None:
                values[field.rate] = per_second

    def _sum(self, values: Values) -> None:
        """Add up the series of several fields, each with its last value."""
        sums: Values = {}
        for field in self._fields:
            if field.adds and field in self._parts:
                for key in field.series:
                    sums[key] = sums.get(key, 0) + self._parts[field]
        values.update(sums)

    def _settle(self, failures: dict[Field, int]) -> None:
        """Drop unsupported fields; raise if no field has a value or the device is gone."""
        meanings = {field: meaning_of(code) for field, code in failures.items()}
        supported = [f for f, meaning in meanings.items() if meaning is not Meaning.UNSUPPORTED]
        for field in supported:
            if meanings[field] in _OF_THE_DEVICE:
                raise pynvml.NVMLError(failures[field])
        if len(failures) == len(self._fields) and supported:
            raise pynvml.NVMLError(failures[supported[0]])
        self.reader.refusals = [failures[field] for field in supported]
        if failures or not self.answered:
            self._learn(failures, {f for f, meaning in meanings.items() if meaning in _FINAL})

    def _learn(self, failures: dict[Field, int], refused: set[Field]) -> None:
        """Leave out what is unsupported, and what is replaced by a supported field."""
        self.answered |= {f.number for f in self._fields if f not in failures}
        self.unsupported |= {f.number for f in refused} - self.answered
        replaced = {f.number for f in self._fields if f.instead_of in self.answered}
        dropped = self.unsupported | replaced
        if any(f.number in dropped for f in self._fields):
            self._keep([f for f in self._fields if f.number not in dropped])
