"""The telemetry log: records as JSON objects, one a line, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import msgspec
from msgspec import NODEFAULT

from warpwatch_telemetry.catalogue import series_key, series_text
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.metric import SeriesKey
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
    Step,
)
from warpwatch_telemetry.state import PARALLELISM

# More than any job has ranks.
MAX_PLACES = 2**20
TYPES: dict[str, type[Record]] = {
    "rank": RankSeen,
    "step": Step,
    "device": DeviceReading,
    "port": PortReading,
    "event": RankEvent,
    "clock": Clock,
    "end": End,
}
_NAMES = {record_type: name for name, record_type in TYPES.items()}
# Values that are the rule and not worth a word.
_SILENT = {
    "samples": 0, "tokens": 0, "reason": "", "phases_s": {}, "up": True, "profiled": False,
    "owner": "", "run": "", "master": "", "pod": "", "pod_uid": "", "parallel": {},
    "driver_load": "", "slot": "",
}  # fmt: skip
# An event's own fields. What its detail calls by the same name is written with a prefix.
_EVENT_FIELDS = ("type", "time", "job", "rank", "event", "owner", "run")
_EVENT = "event_"


def encode(record: Record) -> dict[str, Any]:
    """The JSON object of a record. What is unknown or says nothing (None, empty) is left out."""
    encoded: dict[str, Any] = {"type": _NAMES[type(record)]}
    for name in record.__struct_fields__:
        value = getattr(record, name)
        if name == "detail":
            encoded |= {_EVENT * (key in _EVENT_FIELDS) + key: value[key] for key in value}
        elif name == "metrics":
            encoded["metrics"] = {
                series_text(key): number for key, number in value.items() if math.isfinite(number)
            }
        elif not (value is None or (name in _SILENT and value == _SILENT[name])):
            encoded[name] = dict(value) if isinstance(value, Mapping) else value
    return encoded


def encode_line(record: Record) -> bytes | None:
    """The record as one line of a log, None for one that is no JSON."""
    try:
        return json.dumps(encode(record), separators=(",", ":"), allow_nan=False).encode() + b"\n"
    except (TypeError, ValueError):
        return None


def decode(encoded: Mapping[str, Any]) -> Record:
    """The record of one JSON object on its own. Raises ValueError as ``Decoder.decode``."""
    return Decoder().decode(encoded)


class _DeviceLine(msgspec.Struct, tag_field="type", tag="device"):
    time: float
    device: str = ""
    metrics: dict[str, float] = {}
    up: bool = True
    reason: str = ""
    index: Count | None = None
    driver_load: str = ""
    slot: str = ""


_ABOUT = attrgetter("up", "reason", "index", "driver_load", "slot")
# Of the lines that make up a log.
_usual = msgspec.json.Decoder(Step | _DeviceLine)


class Decoder:
    """Decodes the lines of one log in order.

    A step without its number or duration gets them from the step before it: steps follow each
    other and one lasts from the end of the one before to its own end. Where there is none before,
    it only says that the rank was seen.
    """

    def __init__(self) -> None:
        self._previous: dict[JobId, dict[int, Step | RankSeen]] = {}

    def decode_lines(self, lines: bytes) -> list[Record]:
        """Of steps and devices in the usual form, one a line. Raises ValueError for all else."""
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
        return [_record(one) for one in records] if mixed else records

    def _ranks(self, job: JobId) -> dict[int, Step | RankSeen]:
        return self._previous.setdefault(job, {})

    def decode_line(self, line: bytes) -> Record:
        """The record of one line. Raises ValueError as ``decode``, or because it is no JSON.

        Whole lines of the usual form are read by their types; ``decode`` looks at all others and
        says what is wrong with them.
        """
        try:
            (record,) = self.decode_lines(line)
            return record
        except ValueError:
            return self.decode(json.loads(line.decode(errors="replace")))

    def decode(self, encoded: Mapping[str, Any]) -> Record:
        """The record of one JSON object. Raises ValueError with one line that names the field."""
        if not isinstance(encoded, Mapping):
            raise ValueError(f"a JSON object is needed, found {type(encoded).__name__}")
        name = encoded.get("type")
        kind = TYPES.get(name) if isinstance(name, str) else None
        if kind is None:
            raise ValueError(f"type: {name!r} is none of {', '.join(TYPES)}")
        fields = _fields(kind, encoded)
        return self._step(fields) if kind is Step else kind(**fields)

    def _step(self, fields: dict[str, Any]) -> Record:
        time, rank = fields["time"], fields["rank"]
        job = JobId(fields["owner"], fields["job"], fields["run"])
        ranks = self._ranks(job)
        previous = ranks.get(rank)
        if fields["step"] is None:
            fields["step"] = previous.step + 1 if isinstance(previous, Step) else 0
        if fields["duration_s"] is None and previous is not None:
            fields["duration_s"] = max(0.0, time - previous.time)
        duration_s = fields["duration_s"]
        if duration_s is not None and duration_s < 0:
            raise ValueError(f"duration_s: {duration_s!r} is negative")
        known = duration_s is not None
        ranks[rank] = seen = Step(**fields) if known else RankSeen(time, rank=rank, **job.fields())
        return seen


def _record(line: Step | _DeviceLine) -> Step | DeviceReading:
    if isinstance(line, Step):
        return line
    metrics = {series_key(key): value for key, value in line.metrics.items()}
    return DeviceReading(line.time, line.device, metrics, *_ABOUT(line))


def _is_boundless(value: object) -> bool:
    """A number that no float or word of 64 bits holds: as good as unknown, so it is left out."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and abs(value) > MAX_INTEGER


def _number(value: Any, name: str) -> float:
    try:
        if not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    except (TypeError, OverflowError):
        # A whole number that no float can hold is as little a measurement as a text.
        pass
    raise ValueError(f"{name}: a finite number is needed, not {value!r:.40}")


def _integer(value: Any, name: str) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_INTEGER:
        raise ValueError(f"{name}: a whole number is needed, not {value!r}")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}: a text is needed, not {value!r}")
    return value


def _flag(value: Any, name: str) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}: true or false is needed, not {value!r}")
    return value


def _numbers(value: Any, name: str) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: an object is needed, not {value!r}")
    return {key: _number(number, key) for key, number in value.items()}


def _metrics(value: Any, name: str) -> dict[SeriesKey, float]:
    return {series_key(key): number for key, number in _numbers(value, name).items()}


def read_places(value: Any, name: str) -> dict[str, tuple[int, int]]:
    """Of the known kinds of parallelism; a newer program may know more."""
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


_READERS: dict[str, Callable[[Any, str], Any]] = {
    **dict.fromkeys(("time", "duration_s", "gpu_s"), _number),
    **dict.fromkeys(("rank", "world_size", "step", "samples", "tokens", "index"), _integer),
    "memory_allocated_bytes": _integer,
    **dict.fromkeys(("job", "owner", "run", "device", "master", "reason", "event"), _text),
    **dict.fromkeys(("pod", "pod_uid", "driver_load", "slot"), _text),
    "phases_s": _numbers,
    "metrics": _metrics,
    "parallel": read_places,
    "up": _flag,
    "profiled": lambda value, _: value is True,
}
# What a line may leave out though its record needs it. A step's number and duration follow from
# the step before.
_MISSING = {
    "job": "", "rank": 0, "device": "", "event": "", "metrics": {}, "phases_s": {}, "parallel": {},
}  # fmt: skip
# By type: of each field that is read from the field of its name, what it is where that is missing.
_DEFAULTS: dict[type[Record], dict[str, Any]] = {
    kind: {
        field.name: _MISSING.get(field.name) if field.default is NODEFAULT else field.default
        for field in msgspec.structs.fields(kind)
        if field.name in _READERS
    }
    for kind in _NAMES
}


def _fields(kind: type[Record], encoded: Mapping[str, Any]) -> dict[str, Any]:
    """Every field of a record, each of its type. Only ``time`` must be there."""
    fields = dict(_DEFAULTS[kind])
    for name, default in _DEFAULTS[kind].items():
        value = encoded.get(name)
        if name == "time" or (name in encoded and (value is not None or default is not None)):
            fields[name] = _READERS[name](value, name)
    if kind is RankEvent:
        fields["detail"] = _detail(encoded)
    return fields


def _detail(encoded: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {_EVENT + key: key for key in _EVENT_FIELDS}
    return {
        renamed.get(key, key): value
        for key, value in encoded.items()
        if key not in _EVENT_FIELDS and not _is_boundless(value)
    }
