"""Reads many fields in one call and decodes all answers in one go.

The array stays for the life of the device: filled from a template before each call, so that what
the driver leaves out is an error and not the value of the call before, and unpacked at once.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pynvml

from warpwatch_devices.nvml.fields import Field
from warpwatch_devices.nvml.library import Meaning, function, meaning_of
from warpwatch_devices.nvml.tiers import Reader
from warpwatch_telemetry.metric import Values

# nvmlFieldValue_t: fieldId, scopeId, timestamp (µs), latencyUsec, valueType, nvmlReturn, value.
_ANSWER = struct.Struct("=IIqqIIQ")
# A batch asks single links that did not answer, of fields that others answer, so seldom again.
_RETRY_READINGS = 6
# What an answer means for the whole device, if the driver gives it for a single field.
_OF_THE_DEVICE = (Meaning.LIBRARY, Meaning.LOST, Meaning.RESET_REQUIRED)
_FINAL = (Meaning.UNSUPPORTED, Meaning.NO_PERMISSION)

# The newest value of each field of which several make one series; it outlives the batches.
Parts = dict[Field, float]


def _double(raw: int) -> float | None:
    value: float = struct.unpack("=d", raw.to_bytes(8, "little"))[0]
    return value if math.isfinite(value) else None


def _unsigned(bits: int) -> Callable[[int], float | None]:
    """All ones of the type's own width stand for "not available"."""
    ones = (1 << bits) - 1

    def decode(raw: int) -> float | None:
        value = raw & ones
        return None if value == ones else value

    return decode


def _signed(bits: int) -> Callable[[int], float | None]:
    """-1 is a value: a margin below its threshold."""
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
        """None for the first reading, for one that the driver gave before, and after a restart."""
        before, self._newest = self._newest, (value, time_us)
        if before is None or time_us <= before[1] or value < before[0]:
            return None
        return (value - before[0]) * 1e6 / (time_us - before[1])


class FieldBatch:
    """Some fields of one device. ``reader`` reads them in one call, without those that the device
    does not support: their numbers are in ``unsupported``.

    ``parts``: what a link said last counts for as long as it says nothing.
    """

    def __init__(
        self,
        name: str,
        fields: Sequence[Field],
        period_s: float = 0.0,
        parts: Parts | None = None,
    ) -> None:
        self.reader = Reader(name, self.read, period_s)
        self.answered: set[int] = set()
        self.unsupported: set[int] = set()
        self._parts: Parts = {} if parts is None else parts
        self._resting: list[Field] = []
        self._readings = 0
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
        """Raises NVMLError when no field has answered, or when the device is gone."""
        if not self._fields:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
        self._readings += 1
        if self._resting and self._readings % _RETRY_READINGS == 0:
            fields, self._resting = [*self._fields, *self._resting], []
            self._keep(fields)
        self.reader.calls = 1
        self._answers[:] = self._template
        code = function("nvmlDeviceGetFieldValues")(handle, len(self._fields), self._pointer)
        if code != pynvml.NVML_SUCCESS:
            self._refused(handle, code)
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

    def _sum(self, values: Values) -> None:
        """Series that several fields make together, each with what it said last."""
        sums: Values = {}
        for field in (*self._fields, *self._resting):
            if field.adds and field in self._parts:
                for key in field.series:
                    sums[key] = sums.get(key, 0) + self._parts[field]
        values.update(sums)

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

    def _refused(self, handle: Any, code: int) -> None:
        """An older driver may refuse a call that names a field it does not know: find out which,
        by halves, and fill the answers of the others.
        """
        if meaning_of(code) is not Meaning.UNSUPPORTED:
            raise pynvml.NVMLError(code)
        self._ask(handle, 0, len(self._fields), code)

    def _ask(self, handle: Any, begin: int, end: int, code: int) -> None:
        """The fields from ``begin`` to ``end`` have been refused together with ``code``."""
        size = _ANSWER.size
        if end - begin == 1:
            field = self._fields[begin]
            refused = (field.number, field.scope, 0, 0, 0, code, 0)
            _ANSWER.pack_into(self._answers, begin * size, *refused)
            return
        middle = (begin + end) // 2
        for first, last in ((begin, middle), (middle, end)):
            pointer = ctypes.byref(self._pointer, first * size)
            answer = function("nvmlDeviceGetFieldValues")(handle, last - first, pointer)
            self.reader.calls += 1
            if meaning_of(answer) is Meaning.UNSUPPORTED and answer != pynvml.NVML_SUCCESS:
                self._ask(handle, first, last, answer)
            elif answer != pynvml.NVML_SUCCESS:
                raise pynvml.NVMLError(answer)

    def _settle(self, failures: dict[Field, int]) -> None:
        """Drop what will never answer; raise when nothing did, or when the device is gone."""
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

    def _learn(self, failures: dict[Field, int], dropped: set[Field]) -> None:
        answered = {field.number for field in self._fields if field not in failures}
        self.answered |= answered
        self.unsupported |= {field.number for field in dropped} - self.answered
        replaced = {field for field in self._fields if field.instead_of in self.answered}
        self._resting += [f for f in dropped - replaced if f.number in self.answered]
        dropped |= replaced
        if dropped:
            self._keep([field for field in self._fields if field not in dropped])
