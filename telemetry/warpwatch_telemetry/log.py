"""Converts records to the telemetry log, one JSON object a line, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import NODEFAULT

from warpwatch_telemetry.catalogue import series_key, series_text
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import (
    MAX_INTEGER,
    Clock,
    Count,
    DeviceReading,
    End,
    PortReading,
    RankEvent,
    RankSeen,
    Record,
    Serve,
    Step,
)
from warpwatch_telemetry.state import PARALLELISM

# More than any job has ranks.
MAX_PLACES = 2**20
TYPES: dict[str, type[Record]] = {
    "rank": RankSeen,
    "step": Step,
    "serve": Serve,
    "device": DeviceReading,
    "port": PortReading,
    "event": RankEvent,
    "clock": Clock,
    "end": End,
}
_NAMES = {record_type: name for name, record_type in TYPES.items()}
# By type: the fields of a record, by their names in JSON, each with its default.
_FIELDS: dict[type[Record], dict[str, Any]] = {
    kind: {
        field.encode_name: {} if field.default_factory is dict else field.default
        for field in msgspec.structs.fields(kind)
    }
    for kind in _NAMES
}
# The field of a record whose JSON name is a word of Python.
_ATTRIBUTES = {"class": "work_class"}
# Fields that a line may leave out although their record needs them. A step's number and duration
# follow from the step before.
_MISSING = {"job": "", "rank": 0, "device": "", "event": "", "metrics": {}}
# An event's own fields. The same names in its detail are written with a prefix.
_EVENT_FIELDS = ("type", "time", "job", "rank", "event", "owner", "run")
_EVENT = "event_"
_RENAMED = {_EVENT + key: key for key in _EVENT_FIELDS}


def encode(record: Record) -> dict[str, Any]:
    """Return the JSON object of a record, without fields that have their default."""
    encoded: dict[str, Any] = {"type": _NAMES[type(record)]}
    for name, default in _FIELDS[type(record)].items():
        value = getattr(record, _ATTRIBUTES.get(name, name))
        if name == "detail":
            encoded |= {_EVENT * (key in _EVENT_FIELDS) + key: value[key] for key in value}
        elif name == "metrics":
            encoded["metrics"] = {
                series_text(key): number for key, number in value.items() if math.isfinite(number)
            }
        elif value != default or name == "world_size":
            encoded[name] = dict(value) if isinstance(value, Mapping) else value
    return encoded


def encode_line(record: Record) -> bytes | None:
    """Return the record as one line of a log, or None if it cannot be JSON."""
    try:
        return json.dumps(encode(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError):
        return None


def decode(encoded: Mapping[str, Any]) -> Record:
    """Return the record of a single JSON object. Raises ValueError as ``Decoder.decode``."""
    return Decoder().decode(encoded)


class _DeviceLine(msgspec.Struct, tag_field="type", tag="device"):
    """A line of a device in its usual form: series are texts."""

    time: float
    device: str = ""
    metrics: dict[str, float] = {}
    up: bool = True
    reason: str = ""
    index: Count | None = None
    driver_load: str = ""
    slot: str = ""


# The usual lines of a log, which ``as_record`` turns into records.
UsualLine = Step | RankSeen | Clock | _DeviceLine
_usual = msgspec.json.Decoder(UsualLine)


class Decoder:
    """Decodes the lines of one log in order.

    A step without its number or duration gets them from the step before: it follows it, and lasts
    from its end. The first such line only shows the rank.
    """

    def __init__(self) -> None:
        self._previous: dict[JobId, dict[int, Step | RankSeen]] = {}

    def decode_lines(self, lines: bytes) -> list[Record]:
        """Return records in the usual form, one a line. Raises ValueError otherwise."""
        records: list[Any] = _usual.decode_lines(lines)
        # As bytes.count tells, in a tenth of its time.
        ends = len(lines) - len(lines.replace(b"\n", b""))
        if len(records) != ends + (lines[-1:] != b"\n"):
            raise ValueError("not one record a line")
        job, owner, run, ranks = "", "", "", self._ranks(JobId("", "", ""))
        mixed = False
        for record in records:
            if type(record) is not Step:
                mixed = True
                continue
            if record.job != job or record.run != run or record.owner != owner:
                job, owner, run = record.job, record.owner, record.run
                ranks = self._ranks(record.job_id)
            ranks[record.rank] = record
        return [as_record(one) for one in records] if mixed else records

    def _ranks(self, job: JobId) -> dict[int, Step | RankSeen]:
        return self._previous.setdefault(job, {})

    def decode_line(self, line: bytes) -> Record:
        """Return the record of one line. Raises ValueError as ``decode``, or for a text not JSON.

        Whole lines of the usual form are read by their types; ``decode`` reads the others.
        """
        try:
            (record,) = self.decode_lines(line)
            return record
        except ValueError:
            return self.decode(json.loads(line.decode(errors="replace")))

    def decode(self, encoded: Mapping[str, Any]) -> Record:
        """Return the record of one JSON object. Raises ValueError with the field, in one line."""
        if not isinstance(encoded, Mapping):
            raise ValueError(f"a JSON object is needed, found {type(encoded).__name__}")
        name = encoded.get("type")
        kind = TYPES.get(name) if isinstance(name, str) else None
        if kind is None:
            raise ValueError(f"type: {name!r} is none of {', '.join(TYPES)}")
        fields = _fields(kind, encoded)
        record: Record = self._complete(fields) if kind is Step else _convert(fields, kind)
        if type(record) is Step:
            self._ranks(record.job_id)[record.rank] = record
        return record

    def _complete(self, fields: dict[str, Any]) -> Record:
        """Return the step, with what it lacks from the one before, or else the rank."""
        seen = {name: fields[name] for name in _FIELDS[RankSeen].keys() & fields.keys()}
        rank: RankSeen = _convert(seen, RankSeen)
        ranks = self._ranks(rank.job_id)
        before = ranks.get(rank.rank)
        if before is not None:
            fields.setdefault("duration_s", max(0.0, rank.time - before.time))
        elif "duration_s" not in fields:
            ranks[rank.rank] = rank
            return rank
        fields.setdefault("step", before.step + 1 if isinstance(before, Step) else 0)
        step: Step = _convert(fields, Step)
        return step


def as_record(line: UsualLine) -> Record:
    """Return the record of a line in the usual form. Raises ValueError."""
    if isinstance(line, Step):
        return line
    if isinstance(line, _DeviceLine):
        more = (line.up, line.reason, line.index, line.driver_load, line.slot)
        return DeviceReading(line.time, line.device, _series(line.metrics), *more)
    if isinstance(line, RankSeen) and line.parallel:
        places = read_places(line.parallel, "parallel")
        return msgspec.structs.replace(line, parallel=places)
    return line


def _series(metrics: Mapping[str, float]) -> dict[Any, float]:
    return {series_key(key): value for key, value in metrics.items()}


def _fields(kind: type[Record], encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record for msgspec; only ``time`` must be there."""
    known = _FIELDS[kind]
    fields = {name: _MISSING[name] for name in _MISSING if known.get(name) is NODEFAULT}
    for name in known.keys() & encoded.keys():
        value = encoded[name]
        if name == "metrics":
            fields[name] = _series(_convert(_finite(value, name), dict[str, float], name))
        elif name == "parallel":
            fields[name] = read_places(value, name)
        elif value is not None:
            fields[name] = _finite(value, name)
    if kind is RankEvent:
        fields["detail"] = _detail(encoded)
    return fields


def _convert(fields: Any, kind: Any, name: str = "") -> Any:
    """Return the value of this type. Raises ValueError that begins with the field."""
    try:
        return msgspec.convert(fields, kind, str_keys=True)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        place = name + path.strip(".`")
        raise ValueError(f"{place}: {text}" if place else text) from error


def _finite(value: Any, name: str) -> Any:
    """Return the value with whole numbers as int. Raises ValueError for others without bounds."""
    if isinstance(value, Mapping):
        return {key: _finite(number, key) for key, number in value.items()}
    if _is_boundless(value):
        raise ValueError(f"{name}: a finite number is needed, not {value!r:.40}")
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _is_boundless(value: object) -> bool:
    """Return whether no float or word of 64 bits holds a number."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and abs(value) > MAX_INTEGER


def read_places(value: Any, name: str) -> dict[str, tuple[int, int]]:
    """Return the places of known kinds of parallelism; a newer program may have more kinds."""
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: an object is needed, not {value!r}")
    found = {}
    for kind in PARALLELISM.keys() & value.keys():
        place = value[kind]
        numbers = isinstance(place, list | tuple) and [type(n) for n in place] == [int, int]
        if not numbers or not 0 <= place[0] < place[1] <= MAX_PLACES:
            raise ValueError(f"{name}.{kind}: place and size are needed, not {place!r}")
        found[kind] = (place[0], place[1])
    return found


def _detail(encoded: Mapping[str, Any]) -> dict[str, Any]:
    return {
        _RENAMED.get(key, key): value
        for key, value in encoded.items()
        if key not in _EVENT_FIELDS and not _is_boundless(value)
    }
