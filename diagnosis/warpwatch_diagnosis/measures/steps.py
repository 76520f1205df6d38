"""The longest step as lanes of labelled spans: what a report draws, and no more than that."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from warpwatch_diagnosis.measures.copies import copy_kind
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.host_events import CAUSES, Cause, HostTime
from warpwatch_diagnosis.measures.intervals import Interval, Intervals, difference, union, within
from warpwatch_diagnosis.measures.kernels import classify
from warpwatch_diagnosis.trace.events import TraceEvent, inside


@dataclass(frozen=True, slots=True)
class StepTime:
    """One step. Times in µs; those of the GPU are None and ``idle_us`` is empty without one.

    number: of ProfilerStep#number.
    """

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


def step_times(
    numbers: Sequence[int], steps: Sequence[Interval], loading: Intervals, gpu: GpuTime | None
) -> tuple[StepTime, ...]:
    """``numbers``: of the steps; ``loading``: union of the DataLoader's iteration."""
    times = [
        StepTime(number, begin, end, load)
        for number, (begin, end), load in zip(numbers, steps, within(loading, steps), strict=True)
    ]
    if gpu is None:
        return tuple(times)
    busy, compute = within(gpu.busy, steps), within(gpu.compute, steps)
    communication = within(gpu.communication, steps)
    exposed, copies = within(gpu.exposed_communication, steps), within(gpu.copies, steps)
    causes = {cause: within(gpu.idle_time.by_cause[cause], steps) for cause in CAUSES}
    return tuple(
        replace(
            time,
            gpu_busy_us=busy[index],
            compute_us=compute[index],
            communication_us=communication[index],
            exposed_communication_us=exposed[index],
            memory_copy_us=copies[index],
            idle_us={cause: us[index] for cause, us in causes.items()},
        )
        for index, time in enumerate(times)
    )


# Finer than a pixel of any screen: spans of one label that are closer become one.
RESOLUTION = 2_000
MAX_STREAMS = 8
_MAX_NAME = 120


@dataclass(frozen=True, slots=True)
class LaneSpan:
    """In µs from the step's begin. label: class of kernels, direction of copies, activity of the
    host or cause of idleness, of the longest event in it. name: its name, None where it has none.
    """

    begin_us: float
    end_us: float
    label: str
    name: str | None


@dataclass(frozen=True, slots=True)
class Lane:
    """``spans``: by their begin."""

    name: str
    kind: Literal["host", "stream", "idle"]
    spans: tuple[LaneSpan, ...]


@dataclass(frozen=True, slots=True)
class StepTimeline:
    """The longest step: what the training thread did, each busy stream, the idle time's causes."""

    number: int
    duration_us: float
    lanes: tuple[Lane, ...]


# Begin, end, label and name.
_Labelled = tuple[float, float, str, str]


def longest_step(
    steps: Sequence[StepTime],
    work: Sequence[TraceEvent],
    host: HostTime,
    running: Intervals,
    gpu: GpuTime | None,
) -> StepTimeline | None:
    """None without steps. ``work``: the GPU's events; ``running``: the host's operators."""
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
    for cause, spans in by_cause.items():
        yield from ((begin, end, cause, "") for begin, end in spans)


def _streams(work: list[TraceEvent], window: Interval) -> Iterator[Lane]:
    """The busiest ones."""
    streams: dict[str, list[TraceEvent]] = defaultdict(list)
    for event in work:
        streams[event.thread].append(event)
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
    """Those within one point of the drawing become one, and those of one label next to each other;
    the longest gives label and name."""
    low, high = window
    near_us = (high - low) / RESOLUTION
    merged: list[_Labelled] = []
    longest_us = 0.0
    for begin, end, label, name in sorted(
        (max(begin, low) - low, min(end, high) - low, label, name)
        for begin, end, label, name in labelled
        if begin < high and end > low
    ):
        us = end - begin
        if merged:
            first, last, known, _ = merged[-1]
            if end - first <= near_us or (label == known and begin - last <= near_us):
                named = (label, name) if us > longest_us else merged[-1][2:]
                merged[-1] = (first, max(last, end), *named)
                longest_us = max(longest_us, us)
                continue
        merged.append((begin, end, label, name))
        longest_us = us
    return tuple(
        LaneSpan(begin, end, label, name[:_MAX_NAME] or None) for begin, end, label, name in merged
    )
