"""Where the training thread's time went in a trace without GPU events.

Each instant of the window belongs to one of these, in this order: iterating a DataLoader;
torch.compile at work; garbage collection; a checkpoint; running an operator; waiting while a
collective is under way (gloo runs it on a thread of its own and the training thread shows nothing
meanwhile); the host's own work, that is everything else between the operators. Operators at the
top level that are shorter than DISPATCH_US are counted apart as well: they are mostly the price of
calling them.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from warpwatch_diagnosis.measures.host_events import HostTime
from warpwatch_diagnosis.measures.host_patterns import reading_loops, real_operators, saving_gaps
from warpwatch_diagnosis.measures.intervals import Interval, Intervals, clip, difference, union
from warpwatch_diagnosis.measures.synchronization import Wait
from warpwatch_diagnosis.trace.reader import Event, Trace

# The CPU's counterpart of a short kernel: an eager operator costs a few µs before any arithmetic.
DISPATCH_US = 10.0
# What copies a value to the host: on a GPU each of them waits for it.
_READS = frozenset({"aten::_local_scalar_dense", "aten::nonzero"})
_COLLECTIVE = re.compile(r"(gloo|mpi|ucc|nccl|c10d)::?|record_param_comms")


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Disjoint unions of time in µs, clipped to the window; ``dispatch`` is part of operators.

    compile, gc, checkpoint: of the training thread, as in host_events, outside data loading.
    saving: part of host, probably the writing of a checkpoint. reading: loops that read one value
    after the other, whatever else they do. Both are patterns of host_patterns.
    operators_count, dispatch_count: operators at the top level, and the short ones of them.
    """

    operators: Intervals
    dispatch: Intervals
    waiting: Intervals
    host: Intervals
    compile: Intervals
    gc: Intervals
    checkpoint: Intervals
    saving: Intervals
    reading: Intervals
    operators_count: int
    dispatch_count: int
    collectives: tuple[str, ...]


def cpu_time(
    trace: Trace, window: Interval, loading: Intervals, threads: set[str], host: HostTime
) -> CpuTime:
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
    taken = loading
    named = []
    for activity in (host.compile, host.gc, host.checkpoint):
        named.append(difference(activity.intervals, taken))
        taken = union(taken + activity.intervals)
    operators = difference(running, taken)
    waits = union(clip(_times(collectives), window))
    dispatch = difference(union(clip(_times(short), window)), taken)
    taken = union(taken + operators)
    waiting = difference(waits, taken)
    own = difference([window], union(taken + waiting))
    values = [w[:2] for w in reads(trace.events["operator"], window, threads)]
    loops = reading_loops(values, top, trace.events["annotation"], window)
    return CpuTime(
        operators=operators,
        dispatch=dispatch,
        waiting=waiting,
        host=own,
        saving=saving_gaps(top, own),
        reading=difference(loops, loading),
        compile=named[0],
        gc=named[1],
        checkpoint=named[2],
        operators_count=len(top),
        dispatch_count=len(short),
        collectives=_most_waited(collectives, window),
    )


def reads(events: list[Event], window: Interval, threads: set[str]) -> list[Wait]:
    """Operators that read a value on the host; of a device, each would wait for it. By end."""
    found = [
        Wait(e.begin_us, e.end_us, e.thread, e.name, "read")
        for e in events
        if e.name in _READS
        and e.thread in threads
        and e.begin_us < window[1]
        and e.end_us > window[0]
    ]
    return sorted(found, key=lambda w: (w.end_us, w.begin_us, w.thread, w.name))


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
    mine = real_operators(sorted(mine, key=lambda e: (e.begin_us, -e.end_us, e.name)))
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
