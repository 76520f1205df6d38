"""Explains why the device was idle: each gap of its timeline is split into causes.

A gap ends with the next work of the device. If the host launched that work before the gap began,
the host is not the cause: ``kernel_gap`` is the time that the device takes from one kernel to the
next (up to KERNEL_GAP_US). A longer gap is ``unexplained``. Otherwise the host was late, and the
cause is the first of these:

1. The time between two iterations of a server, then an activity with a name of its own in the
   trace (host_events): compilation, garbage collection,
   checkpoint, data loading, the allocator's calls, a collective that blocks the thread.
2. The wait for the device before the gap (runtime_calls). Without it the host would have been
   earlier by the length of the wait, so it explains that much idle time and no more. It counts
   until the host leads again by more than LEAD_US: ``copy`` if it waited for a copy of data,
   ``allocator`` after its calls, else ``synchronization``.
3. The launch call itself and the time until the work begins: ``launch``; ``copy`` for a copy. More
   than MAX_LAUNCH_US after the call is ``unexplained``: the work was behind other work.
4. Before the launch call: ``launch`` if the thread's previous launch ended at most LAUNCH_PACE_US
   earlier, so that the host merely launches as fast as it can. Else ``dispatch`` inside operators,
   which is the framework's own cost, and ``host`` outside of them: Python, a sleep, the profiler.

If the launch is not in the trace, the rest after 1 is ``unexplained``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter

from warpwatch_diagnosis.intervals import Interval, Intervals, merge, total
from warpwatch_diagnosis.measures.gpu_work import GpuWork, copy_kind
from warpwatch_diagnosis.measures.host_events import CAUSES, SERVER_CAUSES, Cause, HostTime
from warpwatch_diagnosis.measures.iterations import MAX_LAUNCH_US
from warpwatch_diagnosis.measures.runtime_calls import BlockingCall
from warpwatch_diagnosis.trace.events import RuntimeCalls, TraceEvent, by_begin

# Back to back kernels of one stream follow each other within a few µs; launch latency is similar.
KERNEL_GAP_US = 10.0
# Idle time that begins this soon after a wait's return is the wait's (reference of this project).
LEAD_US = 50.0
# Holistic Trace Analysis calls a longer launch an outlier, so such a host does more than launch.
LAUNCH_PACE_US = 50.0
_END_AND_THREAD = attrgetter("end_us", "thread")
_WORST = 3
_MAX_NAME = 200

# Begin, end and cause of a part of a gap, or of a wait in which the host lost its lead.
GapPart = tuple[float, float, Cause]


@dataclass(frozen=True, slots=True)
class IdleGap:
    """One idle interval in µs, for evidence. ``blamed_us``: the time of its main cause.

    before: the GPU work that ended it, None at the end of the trace.
    """

    begin_us: float
    end_us: float
    blamed_us: float
    before: str | None


@dataclass(frozen=True, slots=True)
class IdleTime:
    """Disjoint unions in µs by cause; together they are the device's idle time in the window.

    worst: by main cause, the three gaps in which it takes most time.
    """

    by_cause: Mapping[Cause, Intervals]
    worst: Mapping[Cause, tuple[IdleGap, ...]]

    def of(self, cause: Cause) -> Intervals:
        return self.by_cause.get(cause, [])

    def total_us(self, cause: Cause) -> float:
        return total(self.of(cause))


@dataclass(slots=True)
class OrderedParts:
    """Sorted disjoint parts, queried for spans whose begins do not fall."""

    parts: list[GapPart]
    _first: int = 0

    def inside(self, low: float, high: float) -> tuple[list[GapPart], Intervals]:
        """Return the parts in the span, and the rest of the span."""
        parts, index, count = self.parts, self._first, len(self.parts)
        while index < count and parts[index][1] <= low:
            index += 1
        self._first = index
        found: list[GapPart] = []
        rest: Intervals = []
        while index < count and parts[index][0] < high:
            begin, end, cause = parts[index]
            if begin > low:
                rest.append((low, begin))
            found.append((begin if begin > low else low, end if end < high else high, cause))
            low = end
            index += 1
        if low < high:
            rest.append((low, high))
        return found, rest


@dataclass(slots=True)
class GapSplitter:
    """Splits gaps, which come in order, by the rules of the module.

    named, operators: the host's activities with a name of their own, and its operators. waits:
    sorted by end. previous_ends: by correlation, the end of the launch call before it on the same
    thread. owed_us: the idle time that the last wait explains.
    """

    named: OrderedParts
    operators: OrderedParts
    waits: Sequence[GapPart]
    previous_ends: Mapping[int | None, float]
    owed_us: float = 0.0
    owed_cause: Cause = "synchronization"
    waited_until_us: float = 0.0
    _next_wait: int = 0

    def pass_by(self, event: TraceEvent, launch: TraceEvent) -> None:
        """Note work of the device: a launch well ahead of it clears the time that is owed."""
        self._take_waits(launch.begin_us)
        ahead_us = event.begin_us - launch.end_us
        if ahead_us > LEAD_US and launch.begin_us >= self.waited_until_us:
            self.owed_us = 0.0

    def split(
        self, low: float, high: float, event: TraceEvent | None, launch: TraceEvent | None
    ) -> list[GapPart]:
        """Return sorted parts that add up to the gap from ``low`` to ``high``."""
        if launch is not None and launch.end_us <= low and event is not None:
            queued: Cause = "kernel_gap" if high - low <= KERNEL_GAP_US else "unexplained"
            at_once = event.begin_us - launch.end_us <= KERNEL_GAP_US
            return [(low, high, "launch" if at_once else queued)]
        parts, rest = self.named.inside(low, high)
        if launch is None and event is not None:
            return sorted(parts + [(begin, end, "unexplained") for begin, end in rest])
        until = high if launch is None else min(max(launch.begin_us, low), high)
        self._take_waits(until)
        if until == high:
            # The end of the window may cut a wait for nothing.
            for begin, _, cause in self.waits[self._next_wait : self._next_wait + 1]:
                cut = high - max(low, begin), cause
                self.owed_us, self.owed_cause = max((self.owed_us, self.owed_cause), cut)
        owed_us = max(0.0, self.owed_us - sum(end - begin for begin, end, _ in parts))
        self.owed_us = max(0.0, self.owed_us - (high - low))
        for begin, end in rest:
            paid = min(end, begin + owed_us) if owed_us else begin
            own_end = max(paid, min(end, until))
            if begin < paid:
                owed_us -= paid - begin
                parts.append((begin, paid, self.owed_cause))
            if paid < own_end:
                parts += self._own_time(paid, own_end, launch)
            if own_end < end:
                parts += _on_the_way(own_end, end, event, launch)
        parts.sort()
        return parts

    def _take_waits(self, until_us: float) -> None:
        """Apply the waits that returned before ``until_us``: they delay the host from then on."""
        while self._next_wait < len(self.waits):
            begin, end, cause = self.waits[self._next_wait]
            if end > until_us:
                return
            self._next_wait += 1
            self.waited_until_us = end
            if end - begin >= self.owed_us:
                self.owed_us, self.owed_cause = end - begin, cause

    def _own_time(self, low: float, high: float, launch: TraceEvent | None) -> list[GapPart]:
        """Split the host's time up to a launch call that has no other cause; low < high."""
        before_us = self.previous_ends.get(launch.correlation) if launch is not None else None
        pace_us = launch.begin_us - before_us if launch is not None and before_us else math.inf
        if pace_us <= LAUNCH_PACE_US:
            return [(low, high, "launch")]
        parts, rest = self.operators.inside(low, high)
        return parts + [(begin, end, "host") for begin, end in rest]


def idle_time(
    work: GpuWork,
    launched: Sequence[TraceEvent],
    host: HostTime,
    waits: Sequence[BlockingCall],
    running: Intervals,
) -> IdleTime:
    """Split the idle time of a device with the events ``work``.

    ``launched``: the events of every device, which show the host's pace. ``waits``, sorted by end,
    and ``running``, the union of operators, are those of the threads that train or launch.
    """
    causes = [(begin, end, cause) for cause, spans in host.by_cause() for begin, end in spans]
    splitter = GapSplitter(
        named=OrderedParts(sorted(causes)),
        operators=OrderedParts([(begin, end, "dispatch") for begin, end in running]),
        waits=_host_waits(waits, host),
        previous_ends=_previous_ends(launched, work.calls),
    )
    parts: dict[Cause, list[Interval]] = {cause: [] for cause in CAUSES}
    gaps: dict[Cause, list[IdleGap]] = {}
    for low, high, event in _gaps(work, splitter):
        launch = work.calls.get(event.correlation) if event is not None else None
        split = splitter.split(low, high, event, launch)
        for begin, end, cause in split:
            parts[cause].append((begin, end))
        _remember(gaps, split, low, high, event)
    return IdleTime(
        by_cause={
            cause: merge(found)
            for cause, found in parts.items()
            if found or cause not in SERVER_CAUSES
        },
        worst={cause: tuple(found) for cause, found in gaps.items()},
    )


def _gaps(work: GpuWork, splitter: GapSplitter) -> Iterator[tuple[float, float, TraceEvent | None]]:
    """Yield each idle interval of the window and the work that ended it, in order."""
    reached, high = work.window
    for event in work.events:
        if event.begin_us > reached:
            yield reached, min(event.begin_us, high), event
        if event.begin_us >= high:
            return
        launch = work.calls.get(event.correlation)
        if launch is not None:
            splitter.pass_by(event, launch)
        if event.end_us > reached:
            reached = event.end_us
        if reached >= high:
            return
    if reached < high:
        yield reached, high, None


def _host_waits(waits: Sequence[BlockingCall], host: HostTime) -> list[GapPart]:
    """Return the waits by end. The allocator's calls wait, too: freeing synchronizes the device."""
    found: list[GapPart] = [
        (w.begin_us, w.end_us, "copy" if w.purpose == "copy" else "synchronization") for w in waits
    ]
    found += [(begin, end, "allocator") for begin, end in host.allocator.intervals]
    return sorted(found, key=lambda wait: (wait[1], *wait))


def _previous_ends(work: Sequence[TraceEvent], calls: RuntimeCalls) -> dict[int | None, float]:
    """Return by correlation the end of the launch call before it on the same thread."""
    used = {e.correlation: call for e in work if (call := calls.get(e.correlation)) is not None}
    last: dict[str, float] = {}
    ends: dict[int | None, float] = {}
    for _, _, end_us, thread, correlation, _ in by_begin(used.values(), _END_AND_THREAD):
        if thread in last:
            ends[correlation] = last[thread]
        last[thread] = end_us
    return ends


def _on_the_way(
    low: float, high: float, event: TraceEvent | None, launch: TraceEvent | None
) -> Iterator[GapPart]:
    """Split the time from a launch call to its work, which may be behind work without an event."""
    cause = _launch_cause(event.name) if event else "launch"
    # The driver moves data for a copy before the device begins.
    limited = launch is not None and cause != "copy"
    until = min(high, max(low, launch.end_us + MAX_LAUNCH_US)) if launch and limited else high
    if low < until:
        yield low, until, cause
    if until < high:
        yield until, high, "unexplained"


@lru_cache(maxsize=1024)
def _launch_cause(name: str) -> Cause:
    """Return the cause of the launch call and the way to the device, by the name of the work."""
    lowered = name.lower()
    # Names of kernels may hold a direction by accident: group-TOP-k.
    named = "copy" in lowered and copy_kind(name)[0] not in ("memset", "unknown")
    return "copy" if named or "memcpy" in lowered else "launch"


def _remember(
    gaps: dict[Cause, list[IdleGap]],
    split: list[GapPart],
    low: float,
    high: float,
    event: TraceEvent | None,
) -> None:
    """Keep the gap if it is one of the worst of its main cause."""
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
