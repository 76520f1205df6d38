"""Reads a Kineto/Chrome trace file into a Trace, which has only the events that diagnosis needs.

It reads the formats of PyTorch 1.8 to 2.15 for CUDA, ROCm, XPU and the CPU: ``.json`` or gzip, an
object or a bare array. The JSON is streamed: memory grows with the kept events (about 200 bytes
each), not with the file. Beyond ``max_bytes`` of decompressed text, MAX_RATIO times the file, or
``max_events`` kept events it raises TraceError. ``take_inventory`` counts without keeping an event.
"""

from __future__ import annotations

import gc
import gzip
import os
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, get_args

from warpwatch_diagnosis.trace.events import (
    KINDS,
    MAX_NUMBER,
    Collector,
    Kind,
    TraceEvent,
    decode_elements,
    is_bounded,
    is_time,
)
from warpwatch_diagnosis.trace.files import (
    JsonStream,
    Malformed,
    TraceError,
    TraceSource,
    decode_json,
    rank_in_name,
)

EVENTS = "traceEvents"
MAX_TEXT_BYTES = 4 << 30
# Decompressed bytes for each byte of the file beyond FREE_BYTES; real traces have up to 30.
MAX_RATIO = 200
FREE_BYTES = 8 << 20
MAX_EVENTS = 4_000_000
# The limit on elements, kept or not: 4 GiB of real events are 15 million.
MAX_ELEMENTS = 50_000_000
# No capture takes longer; profilers with broken clocks write events years apart.
MAX_SPAN_S = 86_400.0

_BEGIN, _END = attrgetter("begin_us"), attrgetter("end_us")
# No pipeline has more stages.
MAX_STAGES = 4096
# No capture has more iterations.
MAX_ITERATIONS = 10_000
# The members that are read beside the events.
HEAD = frozenset({"deviceProperties", "distributedInfo", "warpwatch", "baseTimeNanoseconds"})


@dataclass(slots=True)
class Trace:
    """One process's trace. ``rank`` is None if neither the trace nor its name has it.

    stage: the stage of a pipeline and the number of stages, if the trace has them. works: of the
    iterations of a server, prompt tokens and requests that decode.
    """

    file: str
    rank: int | None = None
    world_size: int | None = None
    job: str | None = None
    stage: tuple[int, int] | None = None
    works: tuple[tuple[int, int], ...] = ()
    device_name: str | None = None
    events: dict[Kind, list[TraceEvent]] = field(
        default_factory=lambda: {kind: [] for kind in get_args(Kind)}
    )

    @property
    def count(self) -> int:
        """The number of events."""
        return sum(map(len, self.events.values()))


def read_trace(
    path: TraceSource, max_bytes: int = MAX_TEXT_BYTES, max_events: int = MAX_EVENTS
) -> Trace:
    """Read a trace. Raises TraceError for a file that is not a usable trace."""
    trace = Trace(file=path.name)
    collector = Collector(path, trace.events)
    head: dict[str, Any] = {}
    listed: int | None = None
    with without_collection():
        for key, value in trace_members(path, max_bytes, decode_elements):
            if key == EVENTS:
                listed = len(value) + (listed or 0)
                collector.add(value)
            elif key in HEAD:
                head[key] = value
            if trace.count > max_events:
                raise TraceError(f"{path}: more than {max_events:,} events; capture fewer steps")
    if not listed:
        missing = "traceEvents" if listed is None else "events"
        raise TraceError(f"{path}: not a profiler trace: no {missing} in it")
    if not trace.count:
        raise TraceError(f"{path}: no operator, annotation or GPU event with a usable time")
    _check_span(path, trace)
    _describe(path, trace, head)
    return trace


@contextmanager
def without_collection() -> Iterator[None]:
    """Disable the garbage collector: it would scan all events again and again for cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def trace_members(
    path: TraceSource,
    max_bytes: int = MAX_TEXT_BYTES,
    decode_list: Callable[[str], list[Any]] = decode_json,
) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of the trace's object; for EVENTS, lists of some elements.

    ``decode_list`` decodes the text of a list of elements. Raises TraceError.
    """
    listed = 0
    try:
        with path.open("rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            source: Any = gzip.GzipFile(fileobj=file) if zipped else file
            size = os.fstat(file.fileno()).st_size
            limit = min(max_bytes, FREE_BYTES + MAX_RATIO * size) if zipped else max_bytes
            read = _bounded(path, source.read, limit)
            for key, value in JsonStream(read, decode_list).members(EVENTS):
                listed += len(value) if key == EVENTS else 0
                if listed > MAX_ELEMENTS:
                    raise TraceError(f"{path}: more than {MAX_ELEMENTS:,} elements")
                yield key, value
    except Malformed as error:
        raise TraceError(f"{path}: {error}") from None
    except EOFError:
        raise TraceError(f"{path}: is cut short") from None
    except (gzip.BadGzipFile, zlib.error):
        raise TraceError(f"{path}: damaged gzip data") from None
    except (OSError, ValueError) as error:
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _bounded(path: TraceSource, read: Callable[[int], bytes], limit: int) -> Callable[[int], bytes]:
    left = limit

    def read_within(size: int) -> bytes:
        nonlocal left
        data = read(size)
        left -= len(data)
        if left < 0:
            raise TraceError(f"{path}: more than {limit:,} bytes decompressed")
        return data

    return read_within


def _check_span(path: TraceSource, trace: Trace) -> None:
    kinds = [kept for kept in trace.events.values() if kept]
    first_us = min(min(map(_BEGIN, kept)) for kept in kinds)
    span_us = max(max(map(_END, kept)) for kept in kinds) - first_us
    if span_us > MAX_SPAN_S * 1e6:
        raise TraceError(f"{path}: times span {span_us / 1e6 / 86400:,.0f} days; broken clock")


def _describe(path: TraceSource, trace: Trace, head: dict[str, Any]) -> None:
    distributed, own = _mapping(head, "distributedInfo"), _mapping(head, "warpwatch")
    merged = _count(own, "merged_ranks")
    if merged:
        raise TraceError(f"{path}: {merged} ranks for a viewer; diagnose their own traces")
    # Independent engines of a server have process groups of their own: each has a rank 0 there.
    ranks = (_count(own, "rank"), _count(distributed, "rank"), rank_in_name(trace.file))
    trace.rank = next((rank for rank in ranks if rank is not None), None)
    trace.world_size = _count(distributed, "world_size")
    job = own.get("job")
    trace.job = job if isinstance(job, str) else None
    trace.works = _works(own.get("iterations"))
    trace.stage = _stage(_mapping(own, "parallel").get("pipeline"))
    trace.events["python"] += _gc_pauses(
        trace, own.get("gc_pauses_us"), head.get("baseTimeNanoseconds")
    )
    devices = head.get("deviceProperties")
    if (trace.events["kernel"] or trace.events["copy"]) and isinstance(devices, list):
        trace.device_name = _device_name(devices, trace)


def _works(noted: Any) -> tuple[tuple[int, int], ...]:
    """Return the work of each captured iteration; empty if the note is not usable."""
    if not isinstance(noted, list) or len(noted) > MAX_ITERATIONS:
        return ()
    works = [work[:2] for work in noted if isinstance(work, list) and len(work) >= 2]
    numbers = [number for work in works for number in work]
    if len(works) < len(noted) or not all(type(n) is int and 0 <= n < MAX_NUMBER for n in numbers):
        return ()
    return tuple((tokens, requests) for tokens, requests in works)


def _stage(place: Any) -> tuple[int, int] | None:
    if not isinstance(place, list) or [type(number) for number in place] != [int, int]:
        return None
    return (place[0], place[1]) if 0 <= place[0] < place[1] <= MAX_STAGES else None


def _gc_pauses(trace: Trace, noted: Any, base_ns: Any) -> list[TraceEvent]:
    """Return the garbage collections of ``noted`` while the trace's operators ran.

    The capture recorded them itself: begin since the epoch and duration in µs.
    """
    operators = trace.events["operator"]
    if not isinstance(noted, list) or not operators:
        return []
    first_us, last_us = min(e.begin_us for e in operators), max(e.end_us for e in operators)
    base_us = base_ns / 1e3 if type(base_ns) is int and is_bounded(base_ns) else 0.0
    found = []
    for pause in noted:
        if isinstance(pause, list) and len(pause) == 2 and all(map(is_time, pause)):
            begin_us = pause[0] - base_us
            if first_us < begin_us < last_us and begin_us + pause[1] < last_us:
                found.append(TraceEvent("Python GC", begin_us, begin_us + pause[1], "", None))
    return found


def _device_name(devices: list[Any], trace: Trace) -> str | None:
    """Return the name of the GPU events' device, whose index is their process id."""
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
    return value if type(value) is int and 0 <= value < MAX_NUMBER else None


# No capture has more steps; further ones are not listed.
MAX_LISTED_STEPS = 1000
_STEP = re.compile(r"ProfilerStep#(\d{1,18})")


@dataclass(slots=True)
class TraceInventory:
    """The content of a trace; times are in µs of its own clock.

    listed: all elements. counts: events with a time, by kind. untimed: events of these kinds
    without a time, or with an impossible one (at or before 0). steps: begin and end of each
    ``ProfilerStep#``. begin_us, end_us: the span of all timed events. rank: from the metadata, or
    None. sees_gpu: the profiler found a GPU.
    """

    listed: int = 0
    counts: Counter[Kind] = field(default_factory=Counter)
    untimed: int = 0
    steps: dict[int, tuple[float, float]] = field(default_factory=dict)
    begin_us: float | None = None
    end_us: float | None = None
    rank: int | None = None
    sees_gpu: bool = False


def take_inventory(path: TraceSource) -> TraceInventory:
    """Count the events of a file. Raises TraceError if it is not a whole trace."""
    inventory = TraceInventory()
    head: dict[str, Any] = {}
    for key, value in trace_members(path):
        if key in HEAD:
            head[key] = value
        if key != EVENTS:
            continue
        inventory.listed += len(value)
        for event in value:
            if isinstance(event, dict) and event.get("ph") == "X":
                _add(inventory, event)
    own, distributed = _mapping(head, "warpwatch"), _mapping(head, "distributedInfo")
    rank = _count(own, "rank")
    inventory.rank = _count(distributed, "rank") if rank is None else rank
    inventory.sees_gpu = bool(head.get("deviceProperties"))
    return inventory


def _add(inventory: TraceInventory, event: dict[str, Any]) -> None:
    category, name = event.get("cat"), event.get("name")
    kind = KINDS.get(category) if isinstance(category, str) else None
    if kind is None:
        return
    begin, duration = event.get("ts"), event.get("dur")
    if not is_time(begin) or not is_time(duration) or not begin:
        inventory.untimed += 1
        return
    begin_us = float(begin)
    end_us = begin_us + duration
    inventory.counts[kind] += 1
    inventory.begin_us = min(begin_us, inventory.begin_us or begin_us)
    inventory.end_us = max(end_us, inventory.end_us or end_us)
    if kind in ("annotation", "operator") and isinstance(name, str):
        step = _STEP.fullmatch(name)
        if step and len(inventory.steps) < MAX_LISTED_STEPS:
            inventory.steps[int(step[1])] = (begin_us, end_us)
