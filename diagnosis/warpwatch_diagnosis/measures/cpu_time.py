"""Where the training thread's time went in a trace without GPU events.

Each instant of the window belongs to one of these, in this order: iterating a DataLoader;
torch.compile at work; garbage collection; a checkpoint; running an operator; waiting while a
collective is under way (gloo runs it on a thread of its own and the training thread shows nothing
meanwhile); the host's own work, that is everything else between the operators. Operators at the
top level that are shorter than DISPATCH_US are counted apart as well: they are mostly the price of
calling them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from warpwatch_diagnosis.measures.collectives import MAX_COLLECTIVES
from warpwatch_diagnosis.measures.host_events import (
    BACKGROUND_COLLECTIVE,
    COLLECTIVE,
    HostTime,
)
from warpwatch_diagnosis.measures.host_patterns import (
    reading_loops,
    real_operators,
    saving_gaps,
    spent_on_reads,
)
from warpwatch_diagnosis.measures.intervals import Interval, Intervals, clip, difference, union
from warpwatch_diagnosis.measures.synchronization import reads
from warpwatch_diagnosis.trace.events import Event, inside, spans
from warpwatch_diagnosis.trace.reader import Trace

# The CPU's counterpart of a short kernel: an eager operator costs a few µs before any arithmetic.
DISPATCH_US = 10.0


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Disjoint unions of time in µs, clipped to the window; ``dispatch`` is part of operators.

    compile, gc, checkpoint: of the training thread, as in host_events, outside data loading.
    saving: part of host, probably the writing of a checkpoint. reading: what loops
    that read one value after the other spend on it. Both are patterns of host_patterns.
    operators_count, dispatch_count: operators at the top level, and the short ones of them.
    calls: collectives that a thread of their own runs, (name, the step by its place, µs), in order.
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
    calls: tuple[tuple[str, int, float], ...] = ()


def cpu_time(
    trace: Trace,
    window: Interval,
    loading: Intervals,
    threads: set[str],
    host: HostTime,
    steps: Sequence[Interval],
) -> CpuTime:
    """``loading``: what the DataLoader takes; ``threads``: those that train."""
    annotations = trace.events["annotation"]
    top = _top_level(trace.events["operator"], threads, window)
    short = [e for e in top if e.end_us - e.begin_us < DISPATCH_US]
    collectives = [
        e
        for e in inside(annotations + trace.events["operator"], window)
        if COLLECTIVE.match(e.name)
    ]
    taken, named = loading, []
    for activity in (host.compile, host.gc, host.checkpoint):
        named.append(difference(activity.intervals, taken))
        taken = union(taken + activity.intervals)
    operators = difference(union(clip(spans(top), window)), taken)
    dispatch = difference(union(clip(spans(short), window)), taken)
    taken = union(taken + operators)
    waiting = difference(union(clip(spans(collectives), window)), taken)
    own = difference([window], union(taken + waiting))
    values = [call[:2] for call in reads(trace.events["operator"], window, threads)]
    loops = spent_on_reads(reading_loops(values, top, annotations, window), values, top)
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
        collectives=_most_waited(collectives),
        calls=_calls(collectives, steps),
    )


def _top_level(events: list[Event], threads: set[str], window: Interval) -> list[Event]:
    """Operators of the threads that lie in no other one. Collectives are no work of the thread."""
    mine = [
        e for e in inside(events, window) if e.thread in threads and not COLLECTIVE.match(e.name)
    ]
    top: list[Event] = []
    reached: dict[str, float] = {}
    for event in real_operators(sorted(mine, key=lambda e: (e.begin_us, -e.end_us, e.name))):
        if event.end_us > reached.get(event.thread, event.begin_us - 1):
            top.append(event)
            reached[event.thread] = event.end_us
    return top


def _calls(
    collectives: list[Event], steps: Sequence[Interval]
) -> tuple[tuple[str, int, float], ...]:
    """By their ends: who comes late begins late, and all leave together."""
    begins = [begin for begin, _ in steps]
    mine = [e for e in collectives if BACKGROUND_COLLECTIVE.match(e.name)]
    mine.sort(key=lambda e: (e.end_us, e.name))
    found = ((e.name, bisect_right(begins, e.end_us), e.end_us - e.begin_us) for e in mine)
    return tuple(found)[:MAX_COLLECTIVES]


def _most_waited(collectives: list[Event]) -> tuple[str, ...]:
    spent_us: Counter[str] = Counter()
    for event in collectives:
        spent_us[event.name] += int(event.end_us - event.begin_us)
    return tuple(name for name, _ in spent_us.most_common(3))
