"""Finds the calls that wait for the device, and measures those that launch its work.

A call waits if its name says so (``cudaStreamSynchronize``, ``cudaMemcpy``). A copy from or to
pageable memory waits with any name: the driver moves the data through a buffer of its own.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from statistics import median
from typing import Literal, NamedTuple

from warpwatch_diagnosis.intervals import Interval
from warpwatch_diagnosis.measures.gpu_work import TOP, copy_kind
from warpwatch_diagnosis.trace.events import THREAD, RuntimeCalls, TraceEvent, grouped, inside

Purpose = Literal["read", "copy", "wait"]

WAITS = re.compile(
    r"(cuda|hip)(Stream|Device|Event|Thread|Context)Synchronize|cu(Stream|Ctx|Event)Synchronize"
    r"|hipCtxSynchronize|(cuda|hip)Memcpy(2D|3D|Peer|ToSymbol|FromSymbol)?$|hipMemcpyWithStream"
    r"|cuMemcpy(HtoD|DtoH|DtoD)?(_v2)?$|xpu.*[Ss]ynchronize|ze(CommandQueue|Event|Fence)\w*Synch"
)
# These operators copy a value to the host: on a GPU each of them waits for it.
_READS = frozenset({"aten::_local_scalar_dense", "aten::nonzero"})
# A synchronization this soon after the launch of a copy on the same thread waits for that copy.
AFTER_COPY_US = 100.0
# Larger copies to the host are data (outputs, a checkpoint), not values that steer the program.
MAX_READ_BYTES = 1 << 20
# An asynchronous copy takes a few µs to launch; one that takes this long waits (own value).
BLOCKING_COPY_US = 1_000.0


class BlockingCall(NamedTuple):
    """One call that waited for the device, or would on a GPU; in µs."""

    begin_us: float
    end_us: float
    thread: str
    name: str
    purpose: Purpose


@dataclass(frozen=True, slots=True)
class SynchronizingCall:
    """All calls of one name under one operator at one place.

    name: the runtime's call (``cudaStreamSynchronize``), on a CPU-only trace the operator that
    would synchronize. operator: the innermost operator around it. place: ``file.py(12): function``
    of the user's code. purpose: ``copy`` if it waits for a copy that the operator made, else
    ``read`` (of a value by the host) or ``wait``.
    """

    name: str
    operator: str | None
    place: str | None
    purpose: Purpose
    count: int
    total_us: float
    longest_us: float


@dataclass(frozen=True, slots=True)
class Synchronization:
    """The TOP calls by total time; the count, those begun in each step, and the time of all."""

    calls: tuple[SynchronizingCall, ...]
    count: int
    per_step: tuple[int, ...]
    total_us: float


def waits(
    runtime: Sequence[TraceEvent], copies: RuntimeCalls, window: Interval, threads: set[str]
) -> list[BlockingCall]:
    """Return every call of the threads in the window that waits for the device, by end.

    ``copies`` has the GPU's copies by correlation. A copy that keeps the host waits with any name.
    """
    named = {name for name in {call.name for call in runtime} if WAITS.match(name)}
    pageable = {key for key, copy in copies.items() if copy_kind(copy.name)[1] == "pageable"}
    copying = [call for call in runtime if call.correlation in copies]
    launched = grouped(sorted(copying, key=attrgetter("begin_us", "end_us")), THREAD)
    return _by_end(
        BlockingCall(
            c.begin_us, c.end_us, c.thread, c.name, _purpose(c, launched.get(c.thread, []), copies)
        )
        for c in inside(runtime, window)
        if c.thread in threads and (c.name in named or c.correlation in pageable or _keeps_host(c))
    )


def reads(
    operators: Sequence[TraceEvent], window: Interval, threads: set[str]
) -> list[BlockingCall]:
    """Return the operators that read a value by end; with a GPU each would wait for it."""
    return _by_end(
        BlockingCall(e.begin_us, e.end_us, e.thread, e.name, "read")
        for e in inside(operators, window)
        if e.name in _READS and e.thread in threads
    )


def _by_end(calls: Iterable[BlockingCall]) -> list[BlockingCall]:
    return sorted(calls, key=lambda w: (w.end_us, w.begin_us, w.thread, w.name))


def _keeps_host(call: TraceEvent) -> bool:
    return call.end_us - call.begin_us >= BLOCKING_COPY_US and "Memcpy" in call.name


def _purpose(call: TraceEvent, launched: list[TraceEvent], copies: RuntimeCalls) -> Purpose:
    """Return the purpose by its own copy, or by the one launched just before on the thread."""
    copy = copies.get(call.correlation)
    if copy is None:
        index = bisect_left(launched, call.begin_us, key=attrgetter("begin_us")) - 1
        if index >= 0 and call.begin_us - launched[index].end_us <= AFTER_COPY_US:
            copy = copies.get(launched[index].correlation)
    if copy is None:
        return "copy" if _keeps_host(call) else "wait"
    direction, _ = copy_kind(copy.name)
    small = (copy.number("bytes") or 0) <= MAX_READ_BYTES
    return "read" if direction == "DtoH" and small else "copy"


def synchronization(
    found: Sequence[BlockingCall],
    steps: Sequence[Interval],
    owners: Mapping[tuple[str, float], str],
    places: Mapping[tuple[str, float], str],
) -> Synchronization:
    """Group the calls; ``owners``, ``places``: operator and line of code by thread and begin."""
    groups: dict[tuple[str, str | None, str | None, Purpose], list[float]] = defaultdict(list)
    begins = sorted(wait.begin_us for wait in found)
    for wait in found:
        at = (wait.thread, wait.begin_us)
        key = (wait.name, owners.get(at), places.get(at), wait.purpose)
        groups[key].append(wait.end_us - wait.begin_us)
    calls = [SynchronizingCall(*key, len(us), sum(us), max(us)) for key, us in groups.items()]
    calls.sort(key=lambda c: (-c.total_us, c.name, c.operator or "", c.place or "", c.purpose))
    return Synchronization(
        calls=tuple(calls[:TOP]),
        count=len(found),
        per_step=tuple(
            bisect_left(begins, end) - bisect_left(begins, begin) for begin, end in steps
        ),
        total_us=sum(wait.end_us - wait.begin_us for wait in found),
    )


# Holistic Trace Analysis's limits for a slow launch call and for a late start.
SLOW_CALL_US = 50.0
LATE_START_US = 100.0
# CUDA's launch queue; a launch blocks while it is full.
QUEUE_LIMIT = 1024


@dataclass(frozen=True, slots=True)
class StreamQueue:
    """The queue of one stream's launched work: its longest and its mean length over time.

    full_us: the time with at least QUEUE_LIMIT entries, when a launch call blocks the host.
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
    without_launch: GPU work without a launch in the trace. in_graphs: work of CUDA graphs, which
    short_kernels and queues leave out. queues: busiest first.
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


def launches(work: Sequence[TraceEvent], calls: RuntimeCalls, window: Interval) -> Launches:
    """Measure the launches of ``work``, the kernels and copies in the window by begin."""
    launched = [(event, call) for event in work if (call := calls.get(event.correlation))]
    first: dict[int | None, tuple[TraceEvent, TraceEvent]] = {}
    for event, call in launched:
        first.setdefault(call.correlation, (event, call))
    call_us = sorted(call.end_us - call.begin_us for _, call in first.values())
    delays_us = sorted(max(0.0, event.begin_us - call.end_us) for event, call in first.values())
    queued = [(event, call) for event, call in launched if "GraphLaunch" not in call.name]
    waited = grouped(queued, lambda pair: pair[0].thread)
    queues = [
        _queue(stream, [(call.begin_us, event.begin_us) for event, call in pairs], window)
        for stream, pairs in waited.items()
    ]
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
    """Measure a queue: each launch call's begin adds an entry, each work's begin removes one."""
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
