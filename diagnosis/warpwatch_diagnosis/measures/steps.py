"""Measures each step, and draws up the longest one as lanes of labelled spans."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from warpwatch_diagnosis.intervals import Interval, Intervals, difference, union, within
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.gpu_work import classify, copy_kind
from warpwatch_diagnosis.measures.host_events import CAUSES, Cause, HostTime
from warpwatch_diagnosis.trace.events import THREAD, TraceEvent, grouped, inside, spans
from warpwatch_diagnosis.trace.reader import Trace

_STEP = re.compile(r"(?:ProfilerStep#?\s*|iteration#)(\d+)")
# stop() in the middle of a step leaves a last annotation of a few µs.
RUNT_STEP_SHARE = 0.01
# Finer than a pixel of any screen: spans of one label that are closer become one.
RESOLUTION = 2_000
MAX_STREAMS = 8
_MAX_NAME = 120
# Begin, end, label and name.
_Labelled = tuple[float, float, str, str]


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step. Times in µs. Without a GPU, its times are ``None`` and ``idle_us`` is empty."""

    number: int
    begin_us: float
    end_us: float
    data_loading_us: float
    gpu_busy_us: float | None = None
    compute_us: float | None = None
    communication_us: float | None = None
    exposed_communication_us: float | None = None
    memory_copy_us: float | None = None
    idle_us: Mapping[Cause, float] = field(default_factory=dict)

    @property
    def duration_us(self) -> float:
        return self.end_us - self.begin_us


def step_events(trace: Trace) -> list[TraceEvent]:
    """Return the ProfilerStep annotations in order, each name once, without a runt at the end."""
    marks = (e for e in trace.events["annotation"] if e.name.startswith("ProfilerStep"))
    named = grouped((e for e in marks if _STEP.match(e.name)), lambda e: e.name)
    longest = [max(events, key=_size) for events in named.values()]
    steps = sorted(longest, key=lambda e: (e.begin_us, e.end_us, _number(e), e.name))
    if len(steps) > 1:
        usual_us = max(e.end_us - e.begin_us for e in steps)
        if steps[-1].end_us - steps[-1].begin_us < RUNT_STEP_SHARE * usual_us:
            steps.pop()
    return steps


def _size(event: TraceEvent) -> tuple[float, float, str]:
    """Return a key by which the choice among a step's copies on several threads is unique."""
    return event.end_us - event.begin_us, -event.begin_us, event.thread


def _number(step: TraceEvent) -> int:
    match = _STEP.match(step.name)
    return int(match[1][:18]) if match else 0


def step_times(
    events: Sequence[TraceEvent], loading: Intervals, gpu: GpuTime | None
) -> tuple[StepTime, ...]:
    """Measure the steps; ``loading`` is the union of the DataLoader's iteration."""
    steps, unions = spans(events), {"data_loading_us": loading}
    causes: dict[Cause, list[float]] = {}
    if gpu is not None:
        unions |= {
            "gpu_busy_us": gpu.busy,
            "compute_us": gpu.compute,
            "communication_us": gpu.communication,
            "exposed_communication_us": gpu.exposed_communication,
            "memory_copy_us": gpu.copies,
        }
        causes = {
            cause: within(gpu.idle_time.of(cause), steps)
            for cause in CAUSES
            if cause in gpu.idle_time.by_cause
        }
    spent = {name: within(intervals, steps) for name, intervals in unions.items()}
    return tuple(
        StepTime(
            number=_number(event),
            begin_us=event.begin_us,
            end_us=event.end_us,
            idle_us={cause: us[n] for cause, us in causes.items()},
            **{name: us[n] for name, us in spent.items()},
        )
        for n, event in enumerate(events)
    )


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """A span of the longest step, in µs from its begin.

    label: class of kernels, direction of copies, activity of the host or cause of idleness, of the
    longest event in the span. name: that event's name, if it has one.
    """

    begin_us: float
    end_us: float
    label: str
    name: str | None


@dataclass(frozen=True, slots=True)
class Lane:
    """One row of the drawing; its spans are sorted by begin."""

    name: str
    kind: Literal["host", "stream", "idle"]
    spans: tuple[LaneSpan, ...]


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The longest step: lanes of the training thread, of each busy stream, and of idle causes."""

    number: int
    duration_us: float
    lanes: tuple[Lane, ...]


def longest_step(
    steps: Sequence[StepTime],
    work: Sequence[TraceEvent],
    host: HostTime,
    running: Intervals,
    gpu: GpuTime | None,
) -> StepTimeline | None:
    """Return None without steps. ``work``: the GPU's events; ``running``: the host's operators."""
    if not steps:
        return None
    step = max(steps, key=lambda s: (s.duration_us, -s.begin_us))
    window = step.begin_us, step.end_us
    activities = dict(host.by_cause())
    own = difference(running, union(span for spans in activities.values() for span in spans))
    lanes = [Lane("host", "host", _spans(_of_causes({**activities, "operator": own}), window))]
    lanes += _streams(inside(work, window), window)
    if gpu is not None:
        lanes.append(Lane("idle", "idle", _spans(_of_causes(gpu.idle_time.by_cause), window)))
    return StepTimeline(step.number, step.duration_us, tuple(lanes))


def _of_causes(by_cause: Mapping[Any, Intervals]) -> Iterator[_Labelled]:
    for cause, intervals in by_cause.items():
        yield from ((begin, end, cause, "") for begin, end in intervals)


def _streams(work: list[TraceEvent], window: Interval) -> Iterator[Lane]:
    streams = grouped(work, THREAD)
    busy_us = {
        name: sum(sorted(e.end_us - e.begin_us for e in found)) for name, found in streams.items()
    }
    for name in sorted(streams, key=lambda name: (-busy_us[name], name))[:MAX_STREAMS]:
        labelled = ((e.begin_us, e.end_us, _label(e.name), e.name) for e in streams[name])
        yield Lane(name, "stream", _spans(labelled, window))


@lru_cache(maxsize=1024)
def _label(name: str) -> str:
    direction, _ = copy_kind(name)
    return classify(name) if direction == "unknown" else direction


def _spans(labelled: Iterable[_Labelled], window: Interval) -> tuple[LaneSpan, ...]:
    """Return the spans in the window, from its begin, as far as a drawing shows them."""
    low, high = window
    clipped = sorted(
        (max(begin, low) - low, min(end, high) - low, label, name[:_MAX_NAME] or None)
        for begin, end, label, name in labelled
        if begin < high and end > low
    )
    return tuple(merged((LaneSpan(*span) for span in clipped), (high - low) / RESOLUTION))


def merged(spans: Iterable[LaneSpan], near_us: float) -> list[LaneSpan]:
    """Merge close ones of sorted spans if they have one label, and slivers into the longer one."""
    kept: list[LaneSpan] = []
    for span in spans:
        last = kept[-1] if kept else None
        if last is not None and span.begin_us - last.end_us < near_us:
            us, last_us = span.end_us - span.begin_us, last.end_us - last.begin_us
            if last.label == span.label or max(us, last_us) < near_us:
                longer = span if us > last_us else last
                end_us = max(last.end_us, span.end_us)
                kept[-1] = LaneSpan(last.begin_us, end_us, longer.label, longer.name)
                continue
        kept.append(span)
    return kept
