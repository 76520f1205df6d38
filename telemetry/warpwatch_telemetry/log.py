"""The telemetry log: records as JSON objects, one a line, and back.

Device metrics are keyed by name without the prefix ``device_``, own labels in braces:
``power_watts``, ``clock_hertz{domain=sm}``, ``process_gpu_memory_bytes{pid=17,process=python}``. A
backslash escapes a comma, brace or backslash in a label's value. A metric that the catalogue does
not know keeps its name and labels as written, so an older reader understands a newer log.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from warpwatch_telemetry.catalogue import CATALOGUE
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.records import (
    MAX_INTEGER,
    Clock,
    DeviceReading,
    End,
    RankEvent,
    RankSeen,
    Record,
    Step,
)

_TYPES: dict[str, type[Record]] = {
    "rank": RankSeen,
    "step": Step,
    "device": DeviceReading,
    "event": RankEvent,
    "clock": Clock,
    "end": End,
}
_NAMES = {record_type: name for name, record_type in _TYPES.items()}
# Values that are the rule and not worth a word.
_SILENT = {
    "samples": 0, "tokens": 0, "reason": "", "phases_s": {}, "up": True, "profiled": False,
    "owner": "", "run": "", "master": "",
}  # fmt: skip
_DEVICE = "device_"
# An event's own fields. What its detail calls by the same name is written with a prefix.
_EVENT_FIELDS = ("type", "time", "job", "rank", "event", "owner", "run")
_EVENT = "event_"
_SERIES = re.compile(r"(?P<name>\w+)(?:\{(?P<labels>.*)\})?", re.DOTALL)
T = TypeVar("T")

_LABEL = re.compile(r"(?P<label>\w+)=(?P<value>(?:\\.|[^\\,}])*)(?:,|$)", re.DOTALL)


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
    """The record of one JSON object on its own.

    Raises ValueError with one line that names the field, when a type is wrong or unknown.
    """
    return Decoder().decode(encoded)


def series_text(key: SeriesKey) -> str:
    """The key of a device metric in the log."""
    name, values = key
    row = CATALOGUE.get(name)
    labels = row.labels if row else tuple(f"label{i}" for i in range(len(values)))
    text = name.removeprefix(_DEVICE)
    if not values:
        return text
    pairs = zip(labels, values, strict=False)
    own = ",".join(f"{label}=" + re.sub(r"([\\,}])", r"\\\1", value) for label, value in pairs)
    return f"{text}{{{own}}}"


# A log repeats the same few hundred; process ids come and go.
@functools.lru_cache(maxsize=4096)
def series_key(text: str) -> SeriesKey:
    """The inverse of series_text. Raises ValueError when the text is no series."""
    match = _SERIES.fullmatch(text)
    if match is None:
        raise ValueError(f"metrics: {text!r} is no metric")
    name = match["name"] if match["name"] in CATALOGUE else _DEVICE + match["name"]
    given = _labels(text, match["labels"] or "")
    row = CATALOGUE.get(name)
    labels = row.labels if row else tuple(given)
    return name, tuple(given.get(label, "") for label in labels)


def _labels(text: str, inside: str) -> dict[str, str]:
    labels: dict[str, str] = {}
    position = 0
    while position < len(inside):
        match = _LABEL.match(inside, position)
        if match is None:
            raise ValueError(f"metrics: {text!r} has bad labels")
        labels[match["label"]] = re.sub(r"\\(.)", r"\1", match["value"], flags=re.DOTALL)
        position = match.end()
    return labels


class _DeviceLine(msgspec.Struct, tag_field="type", tag="device"):
    time: float
    device: str = ""
    metrics: dict[str, float] = {}
    up: bool = True
    reason: str = ""


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
        build = _BUILDERS.get(name) if isinstance(name, str) else None
        if name == "step":
            return self._step(encoded)
        if build is None:
            raise ValueError(f"type: {name!r} is none of {', '.join(_TYPES)}")
        return build(encoded)

    def _step(self, encoded: Mapping[str, Any]) -> Record:
        time, rank, job = _number(encoded, "time"), _integer(encoded, "rank"), _job(encoded)
        number = _optional(_integer, encoded, "step")
        duration_s = _optional(_number, encoded, "duration_s")
        ranks = self._ranks(job)
        previous = ranks.get(rank)
        if number is None:
            number = previous.step + 1 if isinstance(previous, Step) else 0
        if duration_s is None and previous is not None:
            duration_s = max(0.0, time - previous.time)
        if duration_s is None:
            ranks[rank] = seen = RankSeen(time, rank=rank, **job.fields())
            return seen
        if duration_s < 0:
            raise ValueError(f"duration_s: {duration_s!r} is negative")
        step = Step(
            time, rank=rank, step=number, duration_s=duration_s,
            **job.fields(), **_measured(encoded),
        )  # fmt: skip
        ranks[rank] = step
        return step


def _record(line: Step | _DeviceLine) -> Step | DeviceReading:
    return line if isinstance(line, Step) else _device_reading(line)


def _device_reading(line: _DeviceLine) -> DeviceReading:
    metrics = {series_key(key): value for key, value in line.metrics.items()}
    return DeviceReading(line.time, line.device, metrics, line.up, line.reason)


def _measured(encoded: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "gpu_s": _optional(_number, encoded, "gpu_s"),
        "phases_s": _numbers(encoded, "phases_s"),
        "memory_allocated_bytes": _optional(_integer, encoded, "memory_allocated_bytes"),
        "samples": _integer(encoded, "samples"),
        "tokens": _integer(encoded, "tokens"),
        "profiled": encoded.get("profiled") is True,
    }


def _rank_seen(encoded: Mapping[str, Any]) -> Record:
    return RankSeen(
        _number(encoded, "time"),
        rank=_integer(encoded, "rank"),
        world_size=_integer(encoded, "world_size", 1),
        device=_optional(_text, encoded, "device"),
        master=_text(encoded, "master"),
        **_job(encoded).fields(),
    )


def _device(encoded: Mapping[str, Any]) -> Record:
    metrics = {series_key(key): value for key, value in _numbers(encoded, "metrics").items()}
    up = encoded.get("up", True)
    if not isinstance(up, bool):
        raise ValueError(f"up: true or false is needed, not {up!r}")
    time, device = _number(encoded, "time"), _text(encoded, "device")
    return DeviceReading(time, device, metrics, up, _text(encoded, "reason"))


def _event(encoded: Mapping[str, Any]) -> Record:
    renamed = {_EVENT + key: key for key in _EVENT_FIELDS}
    return RankEvent(
        _number(encoded, "time"),
        rank=_integer(encoded, "rank"),
        event=_text(encoded, "event"),
        detail={
            renamed.get(k, k): value
            for k, value in encoded.items()
            if k not in _EVENT_FIELDS and not _is_boundless(value)
        },
        **_job(encoded).fields(),
    )


def _is_boundless(value: object) -> bool:
    """A number that no float or word of 64 bits holds: as good as unknown, so it is left out."""
    if isinstance(value, float):
        return not math.isfinite(value)
    return isinstance(value, int) and abs(value) > MAX_INTEGER


def _clock(encoded: Mapping[str, Any]) -> Record:
    return Clock(_number(encoded, "time"))


def _end(encoded: Mapping[str, Any]) -> Record:
    rank = _optional(_integer, encoded, "rank")
    return End(_number(encoded, "time"), rank=rank, **_job(encoded).fields())


_BUILDERS: dict[str, Callable[[Mapping[str, Any]], Record]] = {
    "rank": _rank_seen,
    "device": _device,
    "event": _event,
    "clock": _clock,
    "end": _end,
}


def _number(encoded: Mapping[str, Any], name: str) -> float:
    value = encoded.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name}: a finite number is needed, not {value!r}")
    return float(value)


def _integer(encoded: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = encoded.get(name, default)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > MAX_INTEGER:
        raise ValueError(f"{name}: a whole number is needed, not {value!r}")
    return value


def _text(encoded: Mapping[str, Any], name: str) -> str:
    value = encoded.get(name, "")
    if not isinstance(value, str):
        raise ValueError(f"{name}: a text is needed, not {value!r}")
    return value


def _job(encoded: Mapping[str, Any]) -> JobId:
    return JobId(_text(encoded, "owner"), _text(encoded, "job"), _text(encoded, "run"))


def _optional(
    read: Callable[[Mapping[str, Any], str], T], encoded: Mapping[str, Any], name: str
) -> T | None:
    return None if encoded.get(name) is None else read(encoded, name)


def _numbers(encoded: Mapping[str, Any], name: str) -> dict[str, float]:
    value = encoded.get(name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}: an object is needed, not {value!r}")
    return {key: _number(value, key) for key in value}
