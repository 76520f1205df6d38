"""Writes a reduced trace for a viewer: the steps with their events, and causes of idle time.

It keeps the events that diagnosis reads in as many whole steps around the longest one as fit, and
adds an arrow from each launch to its work and a track that names the cause of each long idle gap.
Several ranks are on the clock of the first one. The file of a single rank can be diagnosed again
with the same verdict; the reader refuses a file of several ranks.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

from warpwatch_diagnosis.measures.gpu_events import GpuEvents
from warpwatch_diagnosis.measures.host_events import CAUSES
from warpwatch_diagnosis.measures.intervals import Interval
from warpwatch_diagnosis.measures.measures import MIN_STEPS, Measures
from warpwatch_diagnosis.trace.events import MEMORY_NAME, Kind, TraceEvent, inside
from warpwatch_diagnosis.trace.reader import Trace, read_trace
from warpwatch_diagnosis.verdict.conclusion import Diagnosis

# The profiler's categories of the kinds, the most important first.
CATEGORIES: dict[Kind, str] = {
    "annotation": "user_annotation",
    "kernel": "kernel",
    "copy": "gpu_memcpy",
    "runtime": "cuda_runtime",
    "operator": "cpu_op",
    "synchronization": "cuda_sync",
    "python": "python_function",
    "memory": "cpu_instant_event",
}
DEVICE: tuple[Kind, ...] = ("kernel", "copy")
# Measured sizes of one event in JSON (braces, keys, times, IDs), rounded up, and of its arrow.
_EVENT_BYTES = 150
_ARGUMENT_BYTES = 40
_ARROW_BYTES = 230


def excerpt_window(trace: Trace, measures: Measures, max_bytes: int) -> Interval | None:
    """Return the steps around the longest one that fit, at least MIN_STEPS; None for all."""
    sizes = [(event, _size(kind, event)) for kind in CATEGORIES for event in trace.events[kind]]
    steps = measures.steps
    if sum(size for _, size in sizes) <= max_bytes or len(steps) <= MIN_STEPS:
        return None
    loads = [
        sum(size for event, size in sizes if begin <= event.begin_us < end) for begin, end in steps
    ]
    first = last = max(range(len(steps)), key=lambda n: steps[n][1] - steps[n][0])
    while sides := [n for n in (last + 1, first - 1) if 0 <= n < len(steps)]:
        side = min(sides, key=lambda n: loads[n])
        wider = min(first, side), max(last, side)
        if last - first + 1 >= MIN_STEPS and sum(loads[wider[0] : wider[1] + 1]) > max_bytes:
            break
        first, last = wider
    return steps[first][0], steps[last][1]


def _size(kind: Kind, event: TraceEvent) -> int:
    size = _EVENT_BYTES + len(event.name) + (_ARROW_BYTES if kind in DEVICE else 0)
    if event.arguments:
        size += sum(_ARGUMENT_BYTES + len(str(value)) for value in event.arguments.values())
    return size


def excerpt(
    trace: Trace, work: GpuEvents, window: Interval | None, max_bytes: int
) -> dict[Kind, list[TraceEvent]]:
    """Return by kind the events in the window, and the launches of its GPU work.

    If they are too large, only the longest of each kind are kept, in the order of CATEGORIES.
    """
    kept: dict[Kind, list[TraceEvent]] = {}
    left = max_bytes
    launched = {
        id(call)
        for event in _kept(work.events, window)
        if (call := work.calls.get(event.correlation)) is not None
    }
    for kind in CATEGORIES:
        found = _kept(trace.events[kind], window)
        if kind == "runtime" and window is not None:
            inside = set(map(id, found))
            found += [e for e in trace.events[kind] if id(e) in launched and id(e) not in inside]
        size = sum(_size(kind, event) for event in found)
        if size > left:
            found = _longest(kind, found, left)
            size = sum(_size(kind, event) for event in found)
        left -= size
        kept[kind] = found
    return kept


def _kept(events: Sequence[TraceEvent], window: Interval | None) -> list[TraceEvent]:
    return list(events) if window is None else inside(events, window)


def _longest(kind: Kind, events: list[TraceEvent], max_bytes: int) -> list[TraceEvent]:
    kept = []
    for event in sorted(events, key=lambda e: e.begin_us - e.end_us):
        max_bytes -= _size(kind, event)
        if max_bytes < 0:
            break
        kept.append(event)
    return kept


# A viewer opens this much, all ranks together, in a second or two.
MAX_BYTES = 64 << 20
MAX_GAPS = 2_000
# In a file of several ranks, the process IDs of rank k start at (k + 1) times this.
_PROCESSES_A_RANK = 100
# The process of the idle track: the last one of a rank; alone, an ID that no machine gives.
_IDLE, _IDLE_ALONE = _PROCESSES_A_RANK - 1, 1 << 30
# The process of events without a thread: pauses of all threads.
_ANY_THREAD = _IDLE_ALONE + 1
_MAX_DIGITS = 15

Element = dict[str, Any]
Id = int | str
PathOrText = str | PathLike[str]


@dataclass(slots=True)
class _RankMapping:
    """The clock and the process IDs of a rank's events in the file.

    first_process: the first ID of this rank; None if the IDs stay.
    """

    label: str
    offset_us: float
    first_process: int | None
    processes: dict[str, Id] = field(default_factory=dict)

    def ids(self, thread: str) -> dict[str, Id]:
        process, _, number = thread.partition("/")
        if process not in self.processes:
            count = min(len(self.processes), _IDLE - 1)
            first = self.first_process
            own = _id(process) if process else _ANY_THREAD
            self.processes[process] = own if first is None else first + count
        return {"pid": self.processes[process], "tid": _id(number) if number else 0}

    @property
    def idle_process(self) -> int:
        return _IDLE_ALONE if self.first_process is None else self.first_process + _IDLE

    def at(self, us: float) -> float:
        return round(us - self.offset_us, 3)


def _id(text: str) -> Id:
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else text


def write_trace(diagnosis: Diagnosis, paths: Sequence[PathOrText], target: Path) -> None:
    """Write the diagnosed traces; compressed if ``target`` ends in ``.gz``.

    Raises TraceError if a trace cannot be read again, OSError if ``target`` cannot be written.
    """
    waiting = list(diagnosis.measures)
    opened = gzip.open if target.suffix == ".gz" else open
    with opened(target, "wt", encoding="utf-8") as file:
        separator = ""
        for index, path in enumerate(paths):
            trace = read_trace(Path(path))
            # Traces of equal name and rank are in the order of their paths.
            measures = next(m for m in waiting if (m.file, m.rank) == (trace.file, trace.rank))
            waiting.remove(measures)
            mapping = _mapping(diagnosis, measures)
            if not index:
                file.write(f'{{{_head(trace, len(paths))},\n"traceEvents": [\n')
            for element in _elements(trace, measures, mapping, MAX_BYTES // len(paths)):
                file.write(separator + json.dumps(element, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")


def _mapping(diagnosis: Diagnosis, measures: Measures) -> _RankMapping:
    offset_us = diagnosis.clock_offset_us(measures) or 0.0
    first = None
    if len(diagnosis.measures) > 1:
        row = [id(m) for m in diagnosis.measures].index(id(measures))
        first = (row + 1) * _PROCESSES_A_RANK
    return _RankMapping(measures.label, offset_us, first)


def _head(trace: Trace, ranks: int) -> str:
    """Return the members beside the events that the reader needs."""
    head: Element = {"schemaVersion": 1, "displayTimeUnit": "ms"}
    work = trace.events["kernel"] or trace.events["copy"]
    if work and trace.device_name is not None:
        device = _id(work[0].thread.partition("/")[0])
        head["deviceProperties"] = [{"id": device, "name": trace.device_name}]
    if ranks > 1:
        head["warpwatch"] = {"merged_ranks": ranks}
    elif trace.rank is not None:
        world = {} if trace.world_size is None else {"world_size": trace.world_size}
        head["distributedInfo"] = {"rank": trace.rank} | world
    return json.dumps(head)[1:-1]


def _elements(
    trace: Trace, measures: Measures, mapping: _RankMapping, max_bytes: int
) -> Iterator[Element]:
    work = GpuEvents.of(trace, measures.window)
    window = excerpt_window(trace, measures, max_bytes)
    kept = excerpt(trace, work, window, max_bytes)
    for kind, events in kept.items():
        for event in events:
            yield _element(kind, event, mapping)
    launched = [event for kind in DEVICE for event in kept[kind]]
    calls = set(map(id, kept["runtime"]))
    for event in launched:
        call = work.calls.get(event.correlation)
        if call is not None and id(call) in calls:
            yield _arrow_end("s", call, call, mapping)
            yield _arrow_end("f", call, event, mapping) | {"bp": "e"}
    yield from _idle_track(measures, window or measures.window, mapping)
    threads = {event.thread for events in kept.values() for event in events}
    yield from _names(threads, {event.thread for event in launched}, mapping)


def _element(kind: Kind, event: TraceEvent, mapping: _RankMapping) -> Element:
    element: Element = {"cat": CATEGORIES[kind], "name": event.name, **mapping.ids(event.thread)}
    element["ts"] = mapping.at(event.begin_us)
    if event.name == MEMORY_NAME:
        element |= {"ph": "i", "s": "t"}
    else:
        element |= {"ph": "X", "dur": round(event.end_us - event.begin_us, 3)}
    arguments = dict(event.arguments or {})
    if event.correlation is not None:
        arguments["correlation"] = event.correlation
    return element | ({"args": arguments} if arguments else {})


def _arrow_end(phase: str, call: TraceEvent, event: TraceEvent, mapping: _RankMapping) -> Element:
    """Return one end of the arrow from a launch call to its work, as the profiler writes it."""
    number: Id | None = call.correlation
    if mapping.first_process is not None:
        # Correlations of two ranks may be equal.
        number = f"{mapping.first_process}.{number}"
    return {
        "ph": phase, "id": number, "cat": "ac2g", "name": "ac2g", **mapping.ids(event.thread),
        "ts": mapping.at(event.begin_us),
    }  # fmt: skip


def _idle_track(measures: Measures, window: Interval, mapping: _RankMapping) -> Iterator[Element]:
    """Yield the longest idle intervals with their causes; the reader ignores their category."""
    if measures.gpu is None:
        return
    gaps = [
        (begin, end, cause)
        for cause in CAUSES
        for begin, end in measures.gpu.idle_time.of(cause)
        if begin < window[1] and end > window[0]
    ]
    gaps.sort(key=lambda gap: (gap[0] - gap[1], gap[0]))
    for begin, end, cause in sorted(gaps[:MAX_GAPS]):
        yield {
            "ph": "X", "cat": "idle", "name": f"idle: {cause}", "pid": mapping.idle_process,
            "tid": 0, "ts": mapping.at(begin), "dur": round(end - begin, 3),
        }  # fmt: skip


def _names(threads: set[str], streams: set[str], mapping: _RankMapping) -> Iterator[Element]:
    """Yield the names of processes and threads, and their order: CPU, GPU, idle time."""
    before = "" if mapping.first_process is None else f"{mapping.label}: "
    order = 10 * (mapping.first_process or 0)
    devices = {thread.partition("/")[0] for thread in streams}
    for process, number in mapping.processes.items():
        on_device = process in devices
        title = f"GPU {process}" if on_device else f"CPU, process {process or 'any'}"
        yield from _process(number, before + title, order + on_device)
    if devices:
        yield from _process(mapping.idle_process, f"{before}GPU idle, by cause", order + 2)
    for thread in sorted(threads):
        name = thread.partition("/")[2].removeprefix("stream ")
        title = f"stream {name}" if thread in streams else f"thread {name}"
        yield {"ph": "M", "name": "thread_name", **mapping.ids(thread), "args": {"name": title}}


def _process(number: Id, title: str, order: int) -> Iterator[Element]:
    common: Element = {"ph": "M", "pid": number, "tid": 0}
    yield common | {"name": "process_name", "args": {"name": title}}
    yield common | {"name": "process_sort_index", "args": {"sort_index": order}}
