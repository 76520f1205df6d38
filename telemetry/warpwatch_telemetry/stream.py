"""Encodes an agent's stream to a fleet: lines of the telemetry log, and lines of its own.

One JSON object a line. An anomaly or a capture comes whole whenever it has changed, a run when it
begins, once a minute, and when it ends.
"""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, get_args

import msgspec

from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.clean_text import clean_line
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.log import TYPES, UsualLine, as_record, decode
from warpwatch_telemetry.records import Record


class AnomalyLine(msgspec.Struct, frozen=True, tag_field="type", tag="anomaly"):
    anomaly: Anomaly


class CaptureLine(msgspec.Struct, frozen=True, tag_field="type", tag="capture"):
    capture: Capture


class RunLine(msgspec.Struct, frozen=True, tag_field="type", tag="run"):
    run: RunSummary


class CursorLine(msgspec.Struct, frozen=True, tag_field="type", tag="cursor"):
    """The end of a batch: a request for lines after ``cursor`` misses none.

    node: the agent's name of its node; version: the agent's.
    """

    cursor: str
    node: str = ""
    version: str = ""


class GapLine(msgspec.Struct, frozen=True, tag_field="type", tag="gap", omit_defaults=True):
    """The number of lines that the reader missed; None if the agent was restarted."""

    lost: int | None = None


StreamLine = AnomalyLine | CaptureLine | RunLine | CursorLine | GapLine

_encoder = msgspec.json.Encoder()
_usual: msgspec.json.Decoder[Any] = msgspec.json.Decoder(UsualLine | StreamLine)
_STREAM_LINES = frozenset(get_args(StreamLine))
_LINES = {str(kind.__struct_config__.tag): kind for kind in _STREAM_LINES}
# By type, the fields of a line; those of an event are free.
_FIELDS = {
    name: {"type", *kind.__struct_encode_fields__}
    for name, kind in (TYPES | _LINES).items()
    if name != "event"
}
_NESTED = {
    name: {field.name for field in fields(kind)}
    for name, kind in (("anomaly", Anomaly), ("capture", Capture), ("run", RunSummary))
}


def encode_stream_line(line: StreamLine) -> bytes:
    return _encoder.encode(line) + b"\n"


def decode_stream_line(line: bytes) -> Record | StreamLine | None:
    """Return the line with its texts cleaned, or None for a type that only newer versions know.

    Lines are independent: a step must have its number and duration, else it only shows the rank.
    Raises ValueError with one line that names the mistake.
    """
    line = clean_line(line)
    try:
        decoded = _usual.decode(line)
        return decoded if type(decoded) in _STREAM_LINES else as_record(decoded)
    except ValueError as error:
        return _decode_unusual(line, error)


def _decode_unusual(line: bytes, mistake: ValueError) -> Record | None:
    """Return the record of a line in another form. Raises ValueError, for our lines ``mistake``."""
    try:
        encoded: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {str(error)[:80]}") from None
    kind = encoded.get("type") if isinstance(encoded, dict) else None
    if not isinstance(kind, str):
        raise ValueError("not an object with a type")
    if kind in _LINES:
        raise mistake
    return decode(encoded) if kind in TYPES else None


def has_newer_fields(line: bytes) -> bool:
    """Return whether a line that can be decoded has fields that only newer versions know."""
    encoded = json.loads(line)
    kind = encoded["type"]
    newer = encoded.keys() - _FIELDS.get(kind, encoded.keys())
    return bool(newer or (kind in _NESTED and encoded[kind].keys() - _NESTED[kind]))
