"""A Kineto/Chrome trace file becomes a Trace: the events that diagnosis needs, and no more.

Reads what PyTorch 1.8 to 2.15 write for CUDA, ROCm and the CPU: ``.json`` or gzip, the category
names of before and after 2022, as an object or as a bare array. The JSON is streamed: memory grows
with the kept events (about 200 bytes each), not with the file. Both are bounded: more than
``max_bytes`` of decompressed text or ``max_events`` kept events is refused with a TraceError.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from warpwatch.diagnosis.errors import TraceError
from warpwatch.diagnosis.json_stream import JsonStream, Malformed

__all__ = ["Event", "Trace", "TraceError", "read_trace"]

MAX_BYTES = 4 << 30
MAX_EVENTS = 4_000_000
# What no capture lasts; profilers with broken clocks write events years apart.
MAX_SPAN_S = 86_400.0

Kind = Literal["operator", "annotation", "runtime", "kernel", "copy"]

# Categories as written from 2022 on (lower case) and before (capitalised).
KINDS: dict[str, Kind] = {
    "cpu_op": "operator",
    "Operator": "operator",
    "user_annotation": "annotation",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "xpu_runtime": "runtime",
    "privateuse1_runtime": "runtime",
    "Runtime": "runtime",
    "kernel": "kernel",
    "Kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
    "Memcpy": "copy",
    "Memset": "copy",
}
# What old traces file under Operator although a person or a library annotated it.
_ANNOTATION = re.compile(
    r"ProfilerStep#|enumerate\(DataLoader\)|Optimizer\.|DistributedDataParallel\."
)
_RANK_IN_NAME = re.compile(r"rank[_-]?(\d{1,6})\.", re.IGNORECASE)


class Event(NamedTuple):
    """Something with a duration. ``correlation`` joins a launch with what it launched."""

    name: str
    begin_us: float
    end_us: float
    thread: str
    correlation: int | None


@dataclass(slots=True)
class Trace:
    """One process's trace. ``rank`` is None when neither the trace nor its name tells it."""

    file: str
    rank: int | None = None
    world_size: int | None = None
    job: str | None = None
    first_step: int | None = None
    device_name: str | None = None
    events: dict[Kind, list[Event]] = field(
        default_factory=lambda: {kind: [] for kind in KINDS.values()}
    )

    def named(self, prefix: str) -> list[Event]:
        """Annotations and operators of the CPU whose name begins with ``prefix``."""
        kinds: tuple[Kind, ...] = ("annotation", "operator")
        return [e for kind in kinds for e in self.events[kind] if e.name.startswith(prefix)]


def read_trace(path: Path, max_bytes: int = MAX_BYTES, max_events: int = MAX_EVENTS) -> Trace:
    """Raises TraceError, in one line, for whatever is no usable trace."""
    trace = Trace(file=path.name)
    head: dict[str, Any] = {}
    names: dict[str, str] = {}
    listed = kept = 0
    for key, value in members(path, max_bytes):
        if key != "traceEvents":
            head[key] = value
            continue
        listed += 1
        kept += _keep(trace, value, names)
        if kept > max_events:
            raise TraceError(f"{path}: more than {max_events:,} events; capture fewer steps")
    if not listed:
        missing = "no events" if "traceEvents" in head or not head else "no traceEvents"
        raise TraceError(f"{path}: not a profiler trace: {missing} in it")
    if not kept:
        raise TraceError(f"{path}: no operator, annotation or GPU event with a usable time")
    _check_span(path, trace)
    _describe(trace, head)
    return trace


def members(path: Path, max_bytes: int = MAX_BYTES) -> Iterator[tuple[str, Any]]:
    """(key, value) of the trace's object, ``traceEvents`` element by element. Raises TraceError."""
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            source: Any = gzip.GzipFile(fileobj=file) if zipped else file
            yield from JsonStream(_bounded(path, source.read, max_bytes)).members("traceEvents")
    except Malformed as error:
        raise TraceError(f"{path}: {error}") from None
    except EOFError:
        raise TraceError(f"{path}: is cut short") from None
    except (gzip.BadGzipFile, zlib.error):
        raise TraceError(f"{path}: damaged gzip data") from None
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _bounded(path: Path, read: Callable[[int], bytes], limit: int) -> Callable[[int], bytes]:
    left = limit

    def read_within(size: int) -> bytes:
        nonlocal left
        data = read(size)
        left -= len(data)
        if left < 0:
            raise TraceError(f"{path}: more than {limit:,} bytes decompressed")
        return data

    return read_within


def _keep(trace: Trace, raw: Any, names: dict[str, str]) -> bool:
    """Whether ``raw`` is an event that diagnosis needs; then it is in ``trace`` now."""
    if not isinstance(raw, dict) or raw.get("ph") != "X":
        return False
    category, name = raw.get("cat"), raw.get("name")
    kind = KINDS.get(category) if isinstance(category, str) else None
    begin_us, duration_us = microseconds(raw.get("ts")), microseconds(raw.get("dur"))
    if kind is None or not isinstance(name, str) or not begin_us or duration_us is None:
        return False
    if kind == "operator" and _ANNOTATION.match(name):
        kind = "annotation"
    name = names.setdefault(name, name)
    thread = f"{raw.get('pid')}/{raw.get('tid')}"
    thread = names.setdefault(thread, thread)
    arguments = raw.get("args")
    correlation = arguments.get("correlation") if isinstance(arguments, dict) else None
    if not isinstance(correlation, int):
        correlation = None
    end_us = begin_us + duration_us
    trace.events[kind].append(Event(name, begin_us, end_us, thread, correlation))
    return True


def microseconds(value: Any) -> float | None:
    """None for what is no time: profilers with a lost clock write negative or absent ones."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not 0 <= value < 1e18 or not math.isfinite(value):
        return None
    return float(value)


def _check_span(path: Path, trace: Trace) -> None:
    events = [event for kept in trace.events.values() for event in kept]
    span_us = max(e.end_us for e in events) - min(e.begin_us for e in events)
    if span_us > MAX_SPAN_S * 1e6:
        raise TraceError(f"{path}: times span {span_us / 1e6 / 86400:,.0f} days; broken clock")


def _describe(trace: Trace, head: dict[str, Any]) -> None:
    distributed, own = _mapping(head, "distributedInfo"), _mapping(head, "warpwatch")
    in_name = _RANK_IN_NAME.search(trace.file)
    ranks = (_count(distributed, "rank"), _count(own, "rank"), int(in_name[1]) if in_name else None)
    trace.rank = next((rank for rank in ranks if rank is not None), None)
    trace.world_size = _count(distributed, "world_size")
    job = own.get("job")
    trace.job = job if isinstance(job, str) else None
    trace.first_step = _count(own, "first_step")
    devices = head.get("deviceProperties")
    if (trace.events["kernel"] or trace.events["copy"]) and isinstance(devices, list):
        trace.device_name = _device_name(devices, trace)


def _device_name(devices: list[Any], trace: Trace) -> str | None:
    """The name of the device that the GPU events belong to, whose process id is its index."""
    event = (trace.events["kernel"] or trace.events["copy"])[0]
    index = event.thread.partition("/")[0]
    known = [d for d in devices if isinstance(d, dict) and isinstance(d.get("name"), str)]
    same = [d for d in known if str(d.get("id")) == index] or known
    return str(same[0]["name"]) if same else None


def _mapping(head: dict[str, Any], key: str) -> dict[str, Any]:
    value = head.get(key)
    return value if isinstance(value, dict) else {}


def _count(mapping: dict[str, Any], key: str) -> int | None:
    value = mapping.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
