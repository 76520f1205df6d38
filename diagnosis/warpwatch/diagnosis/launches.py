"""How the host feeds the device: launch calls, launch delay, queue length."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from warpwatch.diagnosis.intervals import Interval
from warpwatch.diagnosis.reader import Event

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


def by_correlation(events: Sequence[Event]) -> dict[int | None, Event]:
    """The first event of each correlation, whatever the order of ``events``."""
    found: dict[int | None, Event] = {}
    for event in events:
        correlation = event.correlation
        if correlation is None:
            continue
        known = found.get(correlation)
        if known is None or _order(event) < _order(known):
            found[correlation] = event
    return found


def _order(event: Event) -> tuple[float, float, str, str]:
    return event.begin_us, event.end_us, event.thread, event.name


def launches(
    work: Sequence[Event], calls: Mapping[int | None, Event], window: Interval
) -> Launches:
    """``work``: kernels and copies in the window by their begin; ``calls``: runtime calls by
    correlation."""
    pairs = [(e, call) for e in work if (call := calls.get(e.correlation)) is not None]
    first: dict[int | None, tuple[Event, Event]] = {}
    for event, call in pairs:
        first.setdefault(event.correlation, (event, call))
    call_us = [call.end_us - call.begin_us for _, call in first.values()]
    delays_us = [max(0.0, event.begin_us - call.end_us) for event, call in first.values()]
    single = [(event, call) for event, call in pairs if "GraphLaunch" not in call.name]
    return Launches(
        count=len(first),
        total_call_us=sum(sorted(call_us)),
        median_call_us=median(call_us) if pairs else 0.0,
        median_delay_us=median(delays_us) if pairs else 0.0,
        slow_calls=sum(us > SLOW_CALL_US for us in call_us),
        late_starts=sum(us > LATE_START_US for us in delays_us),
        short_kernels=sum(
            event.end_us - event.begin_us < call.end_us - call.begin_us for event, call in single
        ),
        without_launch=len(work) - len(pairs),
        in_graphs=len(pairs) - len(single),
        queues=_queues(single, window),
    )


def _queues(pairs: list[tuple[Event, Event]], window: Interval) -> tuple[StreamQueue, ...]:
    streams: dict[str, list[tuple[Event, Event]]] = defaultdict(list)
    for pair in pairs:
        streams[pair[0].thread].append(pair)
    queues = [_queue(stream, found, window) for stream, found in streams.items()]
    return tuple(sorted(queues, key=lambda q: (-q.launches, q.stream)))


def _queue(stream: str, pairs: list[tuple[Event, Event]], window: Interval) -> StreamQueue:
    """Length over time: one more at each launch call's begin, one less at each work's begin."""
    spans = [(call.begin_us, event.begin_us) for event, call in pairs]
    changes = [(begin, 1) for begin, end in spans if begin < end]
    changes += [(end, -1) for begin, end in spans if begin < end]
    changes.sort()
    length = longest = 0
    area = full = 0.0
    low, high = window
    since = low
    for at, change in changes:
        now = low if at < low else high if at > high else at
        area += length * (now - since)
        full += now - since if length >= QUEUE_LIMIT else 0.0
        since = now
        length += change
        if length > longest:
            longest = length
    mean = area / (high - low) if high > low else 0.0
    return StreamQueue(stream, len(pairs), longest, mean, full)
