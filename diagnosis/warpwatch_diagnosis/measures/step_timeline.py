"""The longest step as lanes of labelled spans: what a report draws, and no more than that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from warpwatch_diagnosis.measures.copies import kind
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.host_events import HostTime
from warpwatch_diagnosis.measures.idle import CAUSES
from warpwatch_diagnosis.measures.intervals import Interval, Intervals, difference, union
from warpwatch_diagnosis.measures.kernels import classify
from warpwatch_diagnosis.measures.steps import StepTime
from warpwatch_diagnosis.trace.reader import Event

# Finer than a pixel of any screen: spans of one label that are closer become one.
RESOLUTION = 2_000
MAX_STREAMS = 8
_MAX_NAME = 120


@dataclass(frozen=True, slots=True)
class Span:
    """In µs from the step's begin. label: class of kernels, direction of copies, activity of the
    host or cause of idleness, of the longest event in it. name: its name, None where it has none.
    count: of the events that are drawn as one; busy_us: the sum of their durations."""

    begin_us: float
    end_us: float
    label: str
    name: str | None
    count: int
    busy_us: float


@dataclass(frozen=True, slots=True)
class Lane:
    """``spans``: by their begin."""

    name: str
    kind: Literal["host", "stream", "idle"]
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The longest step: what the training thread did, each busy stream, the idle time's causes."""

    number: int
    duration_us: float
    lanes: tuple[Lane, ...]


def longest_step(
    steps: Sequence[StepTime],
    work: Sequence[Event],
    host: HostTime,
    running: Intervals,
    gpu: GpuTime | None,
) -> StepTimeline | None:
    """None without steps. ``work``: the GPU's events; ``running``: the host's operators."""
    if not steps:
        return None
    step = max(steps, key=lambda s: (s.duration_us, -s.begin_us))
    window = step.begin_us, step.end_us
    lanes = [_lane("host", "host", _host(host, running), window)]
    lanes += _streams(work, window)
    if gpu is not None:
        causes = ((span, cause, None) for cause in CAUSES for span in gpu.idle_time.by_cause[cause])
        lanes.append(_lane("idle", "idle", causes, window))
    return StepTimeline(step.number, step.duration_us, tuple(lanes))


Labelled = tuple[Interval, str, str | None]


def _host(host: HostTime, running: Intervals) -> Iterable[Labelled]:
    """Disjoint: the first activity that applies."""
    taken: Intervals = []
    activities = (
        ("compile", host.compile.intervals),
        ("gc", host.gc.intervals),
        ("checkpoint", host.checkpoint.intervals),
        ("data_loading", host.loading.intervals),
        ("allocator", host.allocator.intervals),
        ("communication", host.collectives.intervals),
        ("operator", running),
    )
    for label, intervals in activities:
        yield from ((span, label, None) for span in difference(intervals, taken))
        taken = union(taken + intervals)


def _streams(work: Sequence[Event], window: Interval) -> list[Lane]:
    streams: dict[str, list[Event]] = defaultdict(list)
    for event in work:
        if event.begin_us < window[1] and event.end_us > window[0]:
            streams[event.thread].append(event)
    busiest = sorted(streams, key=lambda name: (-_busy_us(streams[name]), name))[:MAX_STREAMS]
    return [_lane(name, "stream", _labelled(streams[name]), window) for name in busiest]


def _busy_us(events: list[Event]) -> float:
    return sum(sorted(e.end_us - e.begin_us for e in events))


def _labelled(events: list[Event]) -> Iterator[Labelled]:
    for name, begin_us, end_us, _, _, _ in events:
        yield (begin_us, end_us), _label(name), name


@lru_cache(maxsize=1024)
def _label(name: str) -> str:
    direction, _ = kind(name)
    return classify(name) if direction == "unknown" else direction


def _lane(
    name: str,
    lane_kind: Literal["host", "stream", "idle"],
    labelled: Iterable[Labelled],
    window: Interval,
) -> Lane:
    low, high = window
    near_us = (high - low) / RESOLUTION
    inside = sorted(
        [
            (max(begin, low) - low, min(end, high) - low, label, event or "")
            for (begin, end), label, event in labelled
            if begin < high and end > low
        ]
    )
    return Lane(name, lane_kind, tuple(_spans(inside, near_us)))


def _spans(events: list[tuple[float, float, str, str]], near_us: float) -> Iterator[Span]:
    """``events``: begin, end, label and name in order. Those within one point of the drawing
    become one, and those of one label next to each other; the longest gives the name."""
    if not events:
        return
    first, last, label, name = events[0]
    count, busy_us, longest_us = 0, 0.0, last - first
    for begin, end, new_label, new_name in events:
        us = end - begin
        same = new_label == label and begin - last <= near_us
        if not same and end - first > near_us:
            yield Span(first, last, label, name[:_MAX_NAME] or None, count, busy_us)
            first, last, label, name = begin, end, new_label, new_name
            count, busy_us, longest_us = 1, us, us
            continue
        if us > longest_us:
            label, name, longest_us = new_label, new_name, us
        if end > last:
            last = end
        count += 1
        busy_us += us
    yield Span(first, last, label, name[:_MAX_NAME] or None, count, busy_us)
