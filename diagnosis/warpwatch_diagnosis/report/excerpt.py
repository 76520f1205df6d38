"""Which events of a trace a reduced one keeps: whole steps around the longest, within a size."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis.measures.gpu_time import GpuEvents
from warpwatch_diagnosis.measures.intervals import Interval
from warpwatch_diagnosis.measures.measures import MIN_STEPS, Measures
from warpwatch_diagnosis.trace.events import Event, inside
from warpwatch_diagnosis.trace.kinds import Kind
from warpwatch_diagnosis.trace.reader import Trace

# Kinds as the profiler's categories, the most important first.
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
# Braces, keys, times and ids of one event in JSON; measured, rounded up. Arrows come on top.
_EVENT_BYTES = 150
_ARGUMENT_BYTES = 40
_ARROW_BYTES = 230


def excerpt_window(trace: Trace, measures: Measures, max_bytes: int) -> Interval | None:
    """The steps around the longest one that fit, at least MIN_STEPS; None for all there is."""
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


def _size(kind: Kind, event: Event) -> int:
    size = _EVENT_BYTES + len(event.name) + (_ARROW_BYTES if kind in DEVICE else 0)
    if event.arguments:
        size += sum(_ARGUMENT_BYTES + len(str(value)) for value in event.arguments.values())
    return size


def excerpt(
    trace: Trace, work: GpuEvents, window: Interval | None, max_bytes: int
) -> dict[Kind, list[Event]]:
    """By kind what lies in the window, and the launches of what ran in it; if that is too much,
    the longest of each kind, in the order of importance of CATEGORIES."""
    kept: dict[Kind, list[Event]] = {}
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


def _kept(events: Sequence[Event], window: Interval | None) -> list[Event]:
    return list(events) if window is None else inside(events, window)


def _longest(kind: Kind, events: list[Event], max_bytes: int) -> list[Event]:
    kept = []
    for event in sorted(events, key=lambda e: e.begin_us - e.end_us):
        max_bytes -= _size(kind, event)
        if max_bytes < 0:
            break
        kept.append(event)
    return kept
