"""Where the training thread's time went in a trace without GPU events.

Each instant of the window belongs to one of four, in this order: iterating a DataLoader; running
an operator; waiting while a collective is under way (gloo runs it on a thread of its own and the
training thread shows nothing meanwhile); the host's own work, that is everything else between the
operators. Operators at the top level that are shorter than DISPATCH_US are counted apart as well:
they are mostly the price of calling them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from warpwatch.diagnosis.intervals import Interval, Intervals, clip, difference, union
from warpwatch.diagnosis.reader import Event, Trace

# The CPU's counterpart of a short kernel: an eager operator costs a few µs before any arithmetic.
DISPATCH_US = 10.0
_COLLECTIVE = re.compile(r"(gloo|mpi|ucc|nccl|c10d)::?|record_param_comms")


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Disjoint unions of time in µs, clipped to the window; ``dispatch`` is part of operators.

    operators_count, dispatch_count: operators at the top level, and the short ones of them.
    """

    operators: Intervals
    dispatch: Intervals
    waiting: Intervals
    host: Intervals
    operators_count: int
    dispatch_count: int
    collectives: tuple[str, ...]


def cpu_time(trace: Trace, window: Interval, loading: Intervals, threads: set[str]) -> CpuTime:
    """``loading``: what the DataLoader takes; ``threads``: those that train."""
    top = _top_level(trace.events["operator"], threads, window)
    short = [e for e in top if e.end_us - e.begin_us < DISPATCH_US]
    collectives = [
        e
        for kind in (trace.events["annotation"], trace.events["operator"])
        for e in kind
        if _COLLECTIVE.match(e.name)
    ]
    running = union(clip(_times(top), window))
    operators = difference(running, loading)
    waits = union(clip(_times(collectives), window))
    taken = union(loading + operators)
    waiting = difference(waits, taken)
    return CpuTime(
        operators=operators,
        dispatch=difference(union(clip(_times(short), window)), loading),
        waiting=waiting,
        host=difference([window], union(taken + waiting)),
        operators_count=len(top),
        dispatch_count=len(short),
        collectives=_most_waited(collectives, window),
    )


def busiest_thread(trace: Trace) -> set[str]:
    """The thread with most operators, where no step annotation names the training thread."""
    counts = Counter(e.thread for e in trace.events["operator"])
    return {thread for thread, _ in counts.most_common(1)}


def _top_level(events: list[Event], threads: set[str], window: Interval) -> list[Event]:
    """Operators of the threads that lie in no other one. Collectives are no work of the thread."""
    mine = [
        e
        for e in events
        if e.thread in threads
        and e.begin_us < window[1]
        and e.end_us > window[0]
        and not _COLLECTIVE.match(e.name)
    ]
    mine.sort(key=lambda e: (e.begin_us, -e.end_us))
    top: list[Event] = []
    reached: dict[str, float] = {}
    for event in mine:
        if event.end_us > reached.get(event.thread, event.begin_us - 1):
            top.append(event)
            reached[event.thread] = event.end_us
    return top


def _times(events: list[Event]) -> list[Interval]:
    return [(e.begin_us, e.end_us) for e in events]


def _most_waited(collectives: list[Event], window: Interval) -> tuple[str, ...]:
    seconds: Counter[str] = Counter()
    for event in collectives:
        if event.begin_us < window[1] and event.end_us > window[0]:
            seconds[event.name] += int(event.end_us - event.begin_us)
    return tuple(name for name, _ in seconds.most_common(3))
