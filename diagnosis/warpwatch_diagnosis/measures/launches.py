"""How the host feeds the device: launch calls, launch delay, queue length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median

from warpwatch_diagnosis.measures.intervals import Interval
from warpwatch_diagnosis.trace.events import Event, by_begin

# Holistic Trace Analysis's limits for a slow launch call and for a late start.
SLOW_CALL_US = 50.0
LATE_START_US = 100.0
# CUDA's launch queue; a launch blocks while it is full.
QUEUE_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class StreamQueue:
    """Work of one stream that was launched and had not begun: longest and time-weighted mean.

    full_us: time with at least QUEUE_LIMIT entries, when a launch call blocks the host.
    """

    stream: str
    launches: int
    longest: int
    mean: float
    full_us: float


@dataclass(frozen=True, slots=True)
class Launches:
    """Launch calls of kernels, copies and memsets whose GPU work is in the window; times in µs.

    A graph's launch counts once, however many kernels it starts. delay: from the end of the call
    to the begin of its first work, at least 0 (Holistic Trace Analysis). slow_calls: longer than
    50 µs; late_starts: delay above 100 µs; short_kernels: shorter than their launch call.
    without_launch: GPU work whose launch is not in the trace. in_graphs: work that a CUDA graph
    launched, which is neither in short_kernels nor in queues. queues: by stream, busiest first.
    """

    count: int
    total_call_us: float
    median_call_us: float
    median_delay_us: float
    slow_calls: int
    late_starts: int
    short_kernels: int
    without_launch: int
    in_graphs: int
    queues: tuple[StreamQueue, ...]


def by_correlation(events: Iterable[Event]) -> dict[int | None, Event]:
    """The first event of each correlation, whatever the order of ``events``."""
    ordered = by_begin(events, attrgetter("end_us", "thread", "name"))
    found = {event.correlation: event for event in reversed(ordered)}
    found.pop(None, None)
    return found


def launches(
    work: Sequence[Event], calls: Mapping[int | None, Event], window: Interval
) -> Launches:
    """``work``: kernels and copies in the window by their begin; ``calls``: runtime calls by
    correlation."""
    launched = [(event, call) for event in work if (call := calls.get(event.correlation))]
    first: dict[int | None, tuple[Event, Event]] = {}
    for event, call in launched:
        first.setdefault(call.correlation, (event, call))
    call_us = sorted(call.end_us - call.begin_us for _, call in first.values())
    delays_us = sorted(max(0.0, event.begin_us - call.end_us) for event, call in first.values())
    queued = [(event, call) for event, call in launched if "GraphLaunch" not in call.name]
    waited: dict[str, list[Interval]] = defaultdict(list)
    for event, call in queued:
        waited[event.thread].append((call.begin_us, event.begin_us))
    queues = [_queue(stream, spans, window) for stream, spans in waited.items()]
    return Launches(
        count=len(first),
        total_call_us=sum(call_us),
        median_call_us=median(call_us) if call_us else 0.0,
        median_delay_us=median(delays_us) if delays_us else 0.0,
        slow_calls=sum(us > SLOW_CALL_US for us in call_us),
        late_starts=sum(us > LATE_START_US for us in delays_us),
        short_kernels=sum(e.end_us - e.begin_us < c.end_us - c.begin_us for e, c in queued),
        without_launch=len(work) - len(launched),
        in_graphs=len(launched) - len(queued),
        queues=tuple(sorted(queues, key=lambda q: (-q.launches, q.stream))),
    )


def _queue(stream: str, spans: list[Interval], window: Interval) -> StreamQueue:
    """Length over time: one more at each launch call's begin, one less at each work's begin."""
    changes = sorted(
        change for begin, end in spans if begin < end for change in ((begin, 1), (end, -1))
    )
    low, high = window
    length = longest = 0
    area = full_us = 0.0
    reached = low
    for at_us, change in changes:
        now = min(max(at_us, low), high)
        area += length * (now - reached)
        full_us += now - reached if length >= QUEUE_LIMIT else 0.0
        reached = now
        length += change
        longest = max(longest, length)
    mean = area / (high - low) if high > low else 0.0
    return StreamQueue(stream, len(spans), longest, mean, full_us)
