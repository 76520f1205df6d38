"""Splits the training thread's time in a trace without GPU events.

Each instant of the window belongs to the first of these: iterating a DataLoader; torch.compile at
work; garbage collection; a checkpoint; running an operator; waiting during a collective (gloo runs
it on a thread of its own, while the training thread has no events); the host's own work, that is,
everything else between the operators.

The order of operators shows activities that no event names. A loop over ``.item()`` reads value
after value. ``state_dict()`` detaches every parameter, and the gap after it writes a file.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from warpwatch_diagnosis.intervals import Interval, Intervals, clip, difference, intersection, union
from warpwatch_diagnosis.measures.gpu_time import MAX_COLLECTIVES
from warpwatch_diagnosis.measures.host_events import BACKGROUND_COLLECTIVE, COLLECTIVE, HostTime
from warpwatch_diagnosis.measures.runtime_calls import reads
from warpwatch_diagnosis.trace.events import TraceEvent, inside, outermost, spans
from warpwatch_diagnosis.trace.reader import Trace

# Under the profiler one pass of a loop that reads a value takes at most this long. A step that logs
# a handful of values has no such loop (own values).
READ_PACE_US = 500.0
# A busy machine may take the core away for a few time slices. If operators hardly run in between,
# the loop is still the same one.
MAX_PAUSE_US = 20_000.0
MIN_READS_IN_A_ROW = 10
# state_dict() detaches one tensor after the other, and models have more than a few. A shorter gap
# is not worth reporting.
MIN_DETACHED = 4
MIN_SAVING_US = 1_000.0
# The Python between picking a value and reading it, under the profiler and on a slow core.
MAX_PICK_US = 100.0

_OPTIMIZER = "Optimizer.step#"
_NEXT = frozenset({"aten::select", "aten::unbind"})
_PICKS = _NEXT | frozenset(
    f"aten::{name}" for name in ("slice", "index", "squeeze", "view", "detach", "to", "narrow")
)
_DETACH = frozenset({"aten::detach", "detach"})
_REGION = "Torch-Compiled Region"
_OVERHEAD = ("TorchDynamo Cache Lookup", "Pregraph bytecode")


def reading_loops(
    reads: Sequence[Interval],
    operators: Sequence[TraceEvent],
    annotations: Sequence[TraceEvent],
    window: Interval,
) -> Intervals:
    """Return the loops that read one value after the other, from the first to the last value.

    ``reads`` and the top-level ``operators`` are sorted. Reads of the step counters by optimizers
    on the CPU do not count.
    """
    stepping = union((e.begin_us, e.end_us) for e in annotations if e.name.startswith(_OPTIMIZER))
    begins = [event.begin_us for event in operators]
    ran_us = list(accumulate((event.end_us - event.begin_us for event in operators), initial=0.0))
    loops: Intervals = []
    for begin, end in _rows(_outside(reads, stepping)):
        if loops and begin - loops[-1][1] <= MAX_PAUSE_US:
            since, until = bisect_left(begins, loops[-1][1]), bisect_left(begins, begin)
            if ran_us[until] - ran_us[since] <= READ_PACE_US:
                loops[-1] = (loops[-1][0], end)
                continue
        loops.append((begin, end))
    return union(clip(loops, window))


def spent_on_reads(
    loops: Intervals, reads: Sequence[Interval], operators: Sequence[TraceEvent]
) -> Intervals:
    """Return the part of the loops that the reads cost.

    It has the reads, the operators that pick the value, and the Python before each. The rest of a
    loop is its own work.
    """
    begins = [begin for begin, _ in loops]
    read_at = [begin for begin, _ in reads]
    spent: Intervals = []
    before_us = 0.0
    for event in operators:
        index = bisect_right(begins, event.end_us) - 1
        inside = index >= 0 and event.begin_us < loops[index][1]
        reading = bisect_left(read_at, event.begin_us) < bisect_right(read_at, event.end_us)
        if inside and (reading or event.name in _PICKS):
            # From read to read the loop does nothing else, even if a busy core makes it slow.
            follows = bool(spent) and spent[-1][1] == before_us and (reading or event.name in _NEXT)
            pause_us = MAX_PAUSE_US if follows else MAX_PICK_US
            low = max(before_us, event.begin_us - pause_us, loops[index][0])
            spent.append((min(low, event.begin_us), event.end_us))
        before_us = event.end_us
    return union(spent)


def _rows(reads: Intervals) -> Intervals:
    """Return the spans of reads that follow each other at the pace of a loop."""
    rows: list[tuple[float, float, int]] = []
    for begin, end in reads:
        if rows and begin - rows[-1][1] <= READ_PACE_US:
            rows[-1] = (rows[-1][0], end, rows[-1][2] + 1)
        else:
            rows.append((begin, end, 1))
    return [(begin, end) for begin, end, count in rows if count >= MIN_READS_IN_A_ROW]


def _outside(reads: Sequence[Interval], taken: Intervals) -> Intervals:
    ends = [end for _, end in taken]
    return [
        (begin, end)
        for begin, end in sorted(reads)
        if (index := bisect_right(ends, begin)) == len(taken) or end <= taken[index][0]
    ]


def saving_gaps(operators: Sequence[TraceEvent], host: Intervals) -> Intervals:
    """Return the gaps of ``host`` right after the detaches of a ``state_dict()``."""
    ends: set[float] = set()
    detached = 0
    for event in operators:
        detached = detached + 1 if event.name in _DETACH else 0
        if detached >= MIN_DETACHED:
            ends.add(event.end_us)
    return [(begin, end) for begin, end in host if begin in ends and end - begin >= MIN_SAVING_US]


def real_operators(operators: Sequence[TraceEvent]) -> list[TraceEvent]:
    """Return sorted operators without those that torch.compile puts around its own calls.

    Their own time is the host's. A region without operators inside stays: nothing else shows its
    work.
    """
    kept: list[TraceEvent] = []
    next_us: dict[str, float] = {}
    for event in reversed(operators):
        if event.name.startswith(_OVERHEAD):
            continue
        wraps = event.name.startswith(_REGION)
        if not wraps or next_us.get(event.thread, event.end_us) >= event.end_us:
            kept.append(event)
        if not wraps:
            next_us[event.thread] = event.begin_us
    return kept[::-1]


# A shorter operator is mostly the cost of calling it: a few µs before any arithmetic.
DISPATCH_US = 10.0


@dataclass(frozen=True, slots=True)
class CpuTime:
    """Disjoint unions of time in µs, clipped to the window.

    dispatch: the part of operators in short ones. compile, gc, checkpoint: as in host_events, on
    the training thread and outside data loading. saving: the part of host that probably writes a
    checkpoint. reading: the time that loops spend on reading values. operators_count,
    dispatch_count: all operators at the top level, and the short ones. collectives: the names that
    take most time. calls: collectives on a thread of their own, (name, number of the step, µs).
    scheduler, waiting_for_work: the host's own time between two iterations of a server.
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
    scheduler: Intervals = field(default_factory=list)
    waiting_for_work: Intervals = field(default_factory=list)


def cpu_time(
    trace: Trace, window: Interval, threads: set[str], host: HostTime, steps: Sequence[Interval]
) -> CpuTime:
    """Split the window; ``threads`` are those that train."""
    annotations, loading = trace.events["annotation"], host.loading.intervals
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
    gaps = (host.server.scheduling, host.server.waiting) if host.server else ([], [])
    scheduler, waiting_for_work = (intersection(own, gap) for gap in gaps)
    own = difference(own, union(scheduler + waiting_for_work))
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
        scheduler=scheduler,
        waiting_for_work=waiting_for_work,
    )


def _top_level(events: list[TraceEvent], threads: set[str], window: Interval) -> list[TraceEvent]:
    """Return the outermost operators of the threads; a collective is not work of its thread."""
    mine = [
        e for e in inside(events, window) if e.thread in threads and not COLLECTIVE.match(e.name)
    ]
    return outermost(real_operators(sorted(mine, key=lambda e: (e.begin_us, -e.end_us, e.name))))


def _calls(
    collectives: list[TraceEvent], steps: Sequence[Interval]
) -> tuple[tuple[str, int, float], ...]:
    """Return background collectives by end: a late rank begins late, but all leave together."""
    begins = [begin for begin, _ in steps]
    mine = [e for e in collectives if BACKGROUND_COLLECTIVE.match(e.name)]
    mine.sort(key=lambda e: (e.end_us, e.name))
    found = ((e.name, bisect_right(begins, e.end_us), e.end_us - e.begin_us) for e in mine)
    return tuple(found)[:MAX_COLLECTIVES]


def _most_waited(collectives: list[TraceEvent]) -> tuple[str, ...]:
    spent_us: Counter[str] = Counter()
    for event in collectives:
        spent_us[event.name] += int(event.end_us - event.begin_us)
    return tuple(name for name, _ in spent_us.most_common(3))
