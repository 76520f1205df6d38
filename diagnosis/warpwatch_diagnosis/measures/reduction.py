"""Packs one rank's measures into a file of about 100 kB, from which a diagnosis over ranks is made.

It is gzip around MessagePack with the schema and the fields of Measures. Unions of intervals are
most of it: the window's begin in µs, a unit, and in this unit the distances to each following begin
and end. The unit is 1 ns, or more if the file would be too large.
"""

from __future__ import annotations

import gzip
import itertools
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import msgspec

from warpwatch_diagnosis.intervals import Interval, Intervals
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.trace.files import TraceError, TraceSource, reduction_name

REDUCTION_SCHEMA = 1
MAX_BYTES = 2**20
# The limit for a file from another machine; real ones unpack to up to eight times the file.
MAX_UNPACKED_BYTES = 16 * MAX_BYTES
_INTERVALS = 1
# Far above all bytes and FLOPs of a trace; sums and products of such numbers stay finite.
_LARGEST = 1e30
# Units in µs. Times since the window's begin are rounded, so that sums of many intervals stay.
_UNITS_US = (1e-3, 0.1, 1.0)


def pack(measures: Measures) -> bytes:
    """Pack into at most MAX_BYTES. Raises TraceError if the measures do not fit."""
    # Only measuring itself needs these.
    operators = replace(measures.operators, owners={}, lines={}, running={})
    measures = replace(measures, operators=operators)
    packed = b""
    for unit_us in _UNITS_US:
        content = _encoder.encode([REDUCTION_SCHEMA, _plain(measures, measures.window[0], unit_us)])
        packed = gzip.compress(content, mtime=0)
        if len(packed) <= MAX_BYTES:
            return packed
        # A report draws the lanes of one rank only.
        measures = replace(measures, timeline=None)
    raise TraceError(f"{measures.file}: its reduction has {len(packed):,} bytes; capture less")


def read_reduction(path: TraceSource) -> Measures:
    """Read a reduction. Raises TraceError if it is not one of this version."""
    try:
        with path.open("rb") as file:
            packed = file.read(MAX_BYTES + 1)
        if not packed:
            raise TraceError(f"{path}: its trace is too large for a reduction; capture less")
        if len(packed) > MAX_BYTES:
            raise TraceError(f"{path}: more than {MAX_BYTES:,} bytes")
        content = zlib.decompressobj(wbits=31).decompress(packed, MAX_UNPACKED_BYTES)
        decoder = msgspec.msgpack.Decoder(tuple[int, Any], ext_hook=_Unions().decode)
        schema, found = decoder.decode(content)
        if schema != REDUCTION_SCHEMA:
            raise TraceError(f"{path}: a reduction of schema {schema}, not {REDUCTION_SCHEMA}")
        _check_numbers(found)
        measures = msgspec.convert(found, Measures)
        if not measures.window[0] < measures.window[1]:
            raise ValueError("its window is empty")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    except (zlib.error, ValueError, TypeError, RecursionError) as error:
        raise TraceError(f"{path}: no reduction of this version: {error}") from None
    if measures.rank is None or not path.name.endswith(reduction_name(f"rank{measures.rank}.")):
        raise TraceError(f"{path}: is of rank {measures.rank}")
    return measures


def _check_numbers(value: Any, name: Any = "") -> None:
    """Raise ValueError for a number that cannot be measured; ``name``: the field of the value."""
    if isinstance(value, int | float):
        if not abs(value) < _LARGEST:
            raise ValueError(f"a number in it is not below {_LARGEST:g}")
        is_share = isinstance(name, str) and name.endswith(("_ratio", "_share"))
        if is_share and not 0 <= value <= 1:
            raise ValueError(f"its {name} is not between 0 and 1")
    elif isinstance(value, dict):
        for key, inner in value.items():
            _check_numbers(inner, key)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_numbers(inner)


def _plain(value: Any, base_us: float, unit_us: float) -> Any:
    """Return the value without classes; tuples stay, because they may be keys."""
    if isinstance(value, list):
        at = [round((us - base_us) / unit_us) for us in itertools.chain((base_us,), *value)]
        steps = [base_us, unit_us, *(after - before for before, after in itertools.pairwise(at))]
        return msgspec.msgpack.Ext(_INTERVALS, _encoder.encode(steps))
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_plain(one, base_us, unit_us) for one in value)
    if isinstance(value, Mapping):
        return {key: _plain(one, base_us, unit_us) for key, one in value.items()}
    if is_dataclass(value):
        known = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {name: _plain(one, base_us, unit_us) for name, one in known}
    return value


class _Unions:
    """Decodes the unions of one file; most of its intervals are in several unions."""

    def __init__(self) -> None:
        self._known: dict[Interval, Interval] = {}

    def decode(self, code: int, data: memoryview) -> Intervals:
        base_us, unit_us, *steps = _steps_decoder.decode(data)
        # Only the first interval may begin before the window.
        if unit_us <= 0 or min(steps[1:], default=0.0) < 0:
            raise ValueError("its intervals are not in order")
        at_us = [base_us + at * unit_us for at in itertools.accumulate(steps)]
        known = self._known
        return [known.setdefault(one, one) for one in zip(at_us[::2], at_us[1::2], strict=True)]


_encoder = msgspec.msgpack.Encoder()
_steps_decoder = msgspec.msgpack.Decoder(list[float])
