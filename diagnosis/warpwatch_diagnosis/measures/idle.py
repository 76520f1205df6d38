"""Why the device was idle: every gap of its own timeline is split into causes that add up to it.

A gap ends with the next work of the device. If the host launched that work before the gap began,
the host is not to blame: ``kernel_gap`` is what the device takes from one kernel to the next
(up to KERNEL_GAP_US), more is ``unexplained``. Otherwise the host was late, and what it did
meanwhile is the cause, in this order:

1. What has a name of its own in the trace (host_events): compilation, garbage collection,
   checkpoint, data loading, the allocator's calls, a collective that blocks the thread.
2. The wait for the device that went before (synchronization): without it the host would have
   been earlier by the time that it waited, so that much idle time is its fault, and no more.
   It counts until the host leads again by more than LEAD_US: ``copy`` if it waited for a copy of
   data, ``allocator`` after its calls, else ``synchronization``. A long wait while the device works
   costs nothing by itself.
3. The launch call itself and what passes until the work begins: ``launch``; ``copy`` for a copy.
4. The rest, up to the launch call: ``launch`` if the thread's launch before it ended at most
   LAUNCH_PACE_US earlier, so that the host merely launches as fast as it can; else ``dispatch``
   inside operators, which is the framework's own price of an operator, and ``host`` outside of
   them, which is Python, a sleep, or the profiler.

Where the launch is not in the trace, what is left after 1 is ``unexplained``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from warpwatch_diagnosis.measures.gap_splitter import GapPart, GapSplitter, HostWait, OrderedParts
from warpwatch_diagnosis.measures.host_events import HostTime
from warpwatch_diagnosis.measures.idle_causes import CAUSES, Cause
from warpwatch_diagnosis.measures.intervals import Interval, Intervals, merge, total
from warpwatch_diagnosis.measures.synchronization import BlockingCall
from warpwatch_diagnosis.trace.events import Event, by_begin

_END_AND_THREAD = attrgetter("end_us", "thread")
_WORST = 3
_MAX_NAME = 200


@dataclass(frozen=True, slots=True)
class IdleGap:
    """One idle interval in µs, for evidence. ``blamed_us``: what its main cause takes of it.

    before: the GPU work that ended it, None at the end of the trace.
    """

    begin_us: float
    end_us: float
    blamed_us: float
    before: str | None


@dataclass(frozen=True, slots=True)
class IdleTime:
    """Disjoint unions in µs by cause; together they are the device's idle time in the window.

    worst: by main cause, the three gaps that it takes most of.
    """

    by_cause: Mapping[Cause, Intervals]
    worst: Mapping[Cause, tuple[IdleGap, ...]]

    def total_us(self, cause: Cause) -> float:
        return total(self.by_cause[cause])


def idle_time(
    work: Sequence[Event],
    launched: Sequence[Event],
    calls: Mapping[int | None, Event],
    window: Interval,
    host: HostTime,
    waits: Sequence[BlockingCall],
    running: Intervals,
) -> IdleTime:
    """``work``: all events of the device by their begin; ``launched``: those of every device, which
    show the host's pace; ``calls``: runtime calls by correlation. Of the threads that train or
    launch: ``waits``, by their end, and ``running``, the union of their operators."""
    splitter = GapSplitter(
        named=OrderedParts(
            sorted((begin, end, cause) for cause, spans in host.by_cause() for begin, end in spans)
        ),
        operators=OrderedParts([(begin, end, "dispatch") for begin, end in running]),
        waits=_host_waits(waits, host),
        previous_ends=_previous_ends(launched, calls),
    )
    parts: dict[Cause, list[Interval]] = {cause: [] for cause in CAUSES}
    gaps: dict[Cause, list[IdleGap]] = {}
    for low, high, event in _gaps(work, calls, window, splitter):
        launch = calls.get(event.correlation) if event is not None else None
        split = splitter.split(low, high, event, launch)
        for begin, end, cause in split:
            parts[cause].append((begin, end))
        _remember(gaps, split, low, high, event)
    return IdleTime(
        by_cause={cause: merge(found) for cause, found in parts.items()},
        worst={cause: tuple(found) for cause, found in gaps.items()},
    )


def _gaps(
    work: Sequence[Event],
    calls: Mapping[int | None, Event],
    window: Interval,
    splitter: GapSplitter,
) -> Iterator[tuple[float, float, Event | None]]:
    """Each idle interval of the window and the work that ended it, in order."""
    low, high = window
    reached = low
    for event in work:
        if event.begin_us > reached:
            yield reached, min(event.begin_us, high), event
        if event.begin_us >= high:
            return
        launch = calls.get(event.correlation)
        if launch is not None:
            splitter.pass_by(event, launch)
        if event.end_us > reached:
            reached = event.end_us
        if reached >= high:
            return
    if reached < high:
        yield reached, high, None


def _host_waits(waits: Sequence[BlockingCall], host: HostTime) -> list[HostWait]:
    """By their end. The allocator's calls wait as well: freeing synchronizes the device."""
    found = [
        HostWait(w.end_us, w.begin_us, "copy" if w.purpose == "copy" else "synchronization")
        for w in waits
    ]
    calls = [HostWait(end, begin, "allocator") for begin, end in host.allocator.intervals]
    return sorted(found + calls)


def _previous_ends(
    work: Sequence[Event], calls: Mapping[int | None, Event]
) -> dict[int | None, float]:
    """By correlation: when the launch call before it on the same thread ended."""
    used = {e.correlation: call for e in work if (call := calls.get(e.correlation)) is not None}
    last: dict[str, float] = {}
    ends: dict[int | None, float] = {}
    for _, _, end_us, thread, correlation, _ in by_begin(used.values(), _END_AND_THREAD):
        if thread in last:
            ends[correlation] = last[thread]
        last[thread] = end_us
    return ends


def _remember(
    gaps: dict[Cause, list[IdleGap]],
    split: list[GapPart],
    low: float,
    high: float,
    event: Event | None,
) -> None:
    """Keeps the gap if it is one of the worst of the cause that takes most of it."""
    blamed: dict[Cause, float] = {}
    for begin, end, cause in split:
        blamed[cause] = blamed.get(cause, 0.0) + end - begin
    cause = max(blamed, key=lambda c: (blamed[c], -CAUSES.index(c)))
    worst = gaps.setdefault(cause, [])
    if len(worst) < _WORST or blamed[cause] > worst[-1].blamed_us:
        before = event.name[:_MAX_NAME] if event else None
        worst.append(IdleGap(low, high, blamed[cause], before))
        worst.sort(key=lambda gap: (-gap.blamed_us, gap.begin_us))
        del worst[_WORST:]
