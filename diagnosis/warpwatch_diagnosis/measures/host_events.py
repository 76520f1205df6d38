"""Finds the host's activities beside operators, which often explain why it is slow.

They have names of their own in the trace: the next batch is fetched, Python collects garbage,
torch.compile compiles, a checkpoint is written, the allocator asks the driver for memory, a
collective blocks the thread. All are unions of intervals in µs, clipped to the window.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from warpwatch_diagnosis.intervals import (
    Interval,
    Intervals,
    clip,
    difference,
    longest_us,
    total,
    union,
)
from warpwatch_diagnosis.measures.iterations import ServerTime
from warpwatch_diagnosis.trace.events import TraceEvent, inside, outermost, spans
from warpwatch_diagnosis.trace.reader import Trace

Cause = Literal[
    "waiting_for_work", "scheduler", "compile", "gc", "checkpoint", "data_loading", "allocator",
    "communication", "synchronization", "copy", "launch", "dispatch", "host", "kernel_gap",
    "unexplained",
]  # fmt: skip
CAUSES: tuple[Cause, ...] = get_args(Cause)
# Only those of servers may be unknown to an older version, so traces of trainings do not have them.
SERVER_CAUSES: tuple[Cause, ...] = CAUSES[:2]


LOADING = re.compile(r"enumerate\(DataLoader\).*__next__")
# torch >= 2.9 with record_python_gc_info and stacks records "Python GC"; with stacks a call of
# gc.collect() is a frame of its own.
_GC = re.compile(r"Python GC\b|<built-in function collect\b|gc\.collect\b")
# dynamo_timed's names since 2.4 end in "(dynamo_timed)"; before, compile times were annotated bare.
_COMPILE = re.compile(
    r".*\(dynamo_timed\)$|dynamo$"
    r"|(_compile\.(_?compile_inner|compile_inner)|entire_frame_compile|entire_backward_compile"
    r"|compile_fx|fx_codegen_and_compile|OutputGraph\.call_user_compiler|call_user_compiler"
    r"|backend_compile|create_aot_dispatcher_function|CachingAutotuner\.benchmark_all_configs"
    r"|async_compile\.wait|TORCHDYNAMO)\b"
)
_COMPILE_FRAME = re.compile(
    r".*torch/(_dynamo/convert_frame\.py\(\d+\): _compile$"
    r"|_inductor/(compile_fx\.py\(\d+\): compile_fx|async_compile\.py\(\d+\): \w+)"
    r"|_inductor/runtime/triton_heuristics\.py\(\d+\): (autotune_to_one_config|precompile))"
)
# The shim's annotation is the bare word. Any other name must also mean saving: neither activation
# checkpointing nor loading a checkpoint counts.
_CHECKPOINT = re.compile(
    r"checkpoint$|(?!.*(gradient|activation|selective|recompute|wrapper|(?<!up)load|restor|CheckpointFunction"
    r"|save_for_backward))"
    r"(?=.*(sav(e|ing)|writ(e|ing)|dump|snapshot|upload|flush|persist|export|\bstor(e|ing)))"
    r".*(torch\.save|checkpoint|ckpt|save_state|save_model|state_dict|\bDCP\b)",
    re.IGNORECASE,
)
_CHECKPOINT_FRAME = re.compile(
    r"(?!.*((gradient|activation|selective)_?checkpoint|checkpoint_wrapper))"
    r"(.*torch/(serialization\.py\(\d+\): save$"
    r"|distributed/checkpoint/state_dict_saver\.py\(\d+\): (save|async_save)$)"
    r"|.*(?<!utils/)checkpoint\w*\.py\(\d+\): save\w*$"
    r"|.*\.py\(\d+\): (_?save_(checkpoint|ckpt|model|state)\w*|save_pretrained)$)"
)
# PyTorch's caching allocators call these if their pools do not suffice.
_ALLOCATOR = re.compile(
    r"(cuda|hip)(Malloc|Free|Host(Alloc|Malloc|Free|Register|Unregister))(?!FromPool|Async)"
    r"|(cuda|hip)(MallocHost|FreeHost|MallocManaged)"
    r"|(cu|hip)Mem(Create|Map|Unmap|Release|SetAccess|AddressReserve|AddressFree)\b"
)
# vLLM's workers on CPUs meet in memory.
COLLECTIVE = re.compile(
    r"(gloo|mpi|ucc|nccl|c10d|rccl|hccl|xccl)::?|record_param_comms|_C::shm_all\w+"
)

# A collective that keeps its thread for longer was not merely enqueued.
BLOCKING_COLLECTIVE_US = 1_000.0
# The time from a batch that another thread has fetched to the first operator on it: through a
# queue, to a thread that needs the interpreter's lock (own value).
HANDOVER_US = 2_000.0
_NAMES = 5
# Guards, the cache lookup and entering the next region take 50 to 300 µs.
BOUNDARY_US = 1_000.0
_REGION = re.compile(r"Torch-Compiled Region(?:: \S*?(\d+)/(\d+))?")
BACKGROUND_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):")

_ANNOTATED: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("loading", LOADING),
    ("gc", _GC),
    ("compile", _COMPILE),
    ("collectives", COLLECTIVE),
    ("region", _REGION),
    ("checkpoint", _CHECKPOINT),
)
_FRAMES = (("gc", _GC), ("compile", _COMPILE_FRAME), ("checkpoint", _CHECKPOINT_FRAME))
ACTIVITIES = ("loading", "gc", "compile", "checkpoint", "allocator", "collectives")


@dataclass(frozen=True, slots=True)
class HostActivity:
    """One kind of host activity. ``names``: its names in the trace, longest first."""

    count: int
    total_us: float
    longest_us: float
    names: tuple[str, ...]
    intervals: Intervals


@dataclass(frozen=True, slots=True)
class HostTime:
    """The host's activities in the window, on the threads that train or launch (GC: on any).

    loading: a DataLoader's iteration; if another thread iterates it, only the training threads'
    waiting for it. compile: torch.compile at work, not the compiled code; its count has outermost
    compilations. checkpoint: torch.save, torch.distributed.checkpoint and annotations. allocator:
    calls that get memory from the driver or return it. collectives: on the training threads, and
    gloo's on any thread. compiled_regions: calls of compiled code; recompiled_regions: regions that
    an earlier compilation did not fit; compiled_frames: functions, or parts between graph breaks,
    with regions; compiled_spans: the regions with the short gaps between them. server: None in a
    training.
    """

    loading: HostActivity
    gc: HostActivity
    compile: HostActivity
    checkpoint: HostActivity
    allocator: HostActivity
    collectives: HostActivity
    compiled_regions: int
    recompiled_regions: int
    compiled_frames: int
    compiled_spans: Intervals
    server: ServerTime | None = None

    def by_cause(self) -> Iterator[tuple[Cause, Intervals]]:
        """Yield disjoint intervals: of several activities at one time, the first counts."""
        taken: Intervals = []
        if self.server is not None:
            yield "waiting_for_work", self.server.waiting
            yield "scheduler", self.server.scheduling
            taken = union(self.server.waiting + self.server.scheduling)
        activities: dict[Cause, HostActivity] = {
            "compile": self.compile,
            "gc": self.gc,
            "checkpoint": self.checkpoint,
            "data_loading": self.loading,
            "allocator": self.allocator,
            "communication": self.collectives,
        }
        for cause, activity in activities.items():
            yield cause, difference(activity.intervals, taken)
            taken = union(taken + activity.intervals)


def host_time(
    trace: Trace, window: Interval, threads: set[str], server: ServerTime | None = None
) -> HostTime:
    """Measure the activities; ``threads`` train or launch, other ones do not delay a step."""
    found: dict[str, list[TraceEvent]] = defaultdict(list)
    _sort(trace.events["annotation"], _ANNOTATED, window, found)
    _sort(trace.events["operator"], _ANNOTATED, window, found)
    _sort(trace.events["python"], _FRAMES, window, found)
    _sort(trace.events["runtime"], (("allocator", _ALLOCATOR),), window, found)
    regions = found.pop("region", [])
    mine = {what: [e for e in found[what] if e.thread in threads] for what in ACTIVITIES}
    # An interpreter has one garbage collection at a time and it stops every thread.
    mine["gc"] = found["gc"]
    mine["collectives"] = [e for e in found["collectives"] if _keeps_thread(e, threads)]
    activities = {what: _activity(mine[what], window) for what in ACTIVITIES}
    if found["loading"] and not mine["loading"]:
        activities["loading"] = _waited_for(found["loading"], trace, window, threads)
    numbers = {match.groups() for e in regions if (match := _REGION.match(e.name))}
    return HostTime(
        **activities,
        compiled_regions=len(regions),
        # Regions are numbered frame/compilation; above 0 the frame was compiled again.
        recompiled_regions=sum(compilation not in (None, "0") for _, compilation in numbers),
        compiled_frames=len({frame for frame, _ in numbers if frame}),
        compiled_spans=compiled_spans(regions, window),
        server=server,
    )


def _sort(
    events: Sequence[TraceEvent],
    patterns: tuple[tuple[str, re.Pattern[str]], ...],
    window: Interval,
    found: dict[str, list[TraceEvent]],
) -> None:
    """Add the events in the window to ``found``; each name is matched once."""
    names = {event.name for event in events}
    matches = {name: next((what for what, p in patterns if p.match(name)), None) for name in names}
    if any(matches.values()):
        for event in inside(events, window):
            what = matches[event.name]
            if what is not None:
                found[what].append(event)


def _keeps_thread(event: TraceEvent, threads: set[str]) -> bool:
    """Return whether a collective blocks a thread that trains: NCCL's calls only enqueue."""
    if BACKGROUND_COLLECTIVE.match(event.name):
        return True
    return event.thread in threads and event.end_us - event.begin_us >= BLOCKING_COLLECTIVE_US


def _waited_for(
    loading: list[TraceEvent], trace: Trace, window: Interval, threads: set[str]
) -> HostActivity:
    """Return a prefetcher's loading as far as the training threads wait for it.

    They do nothing meanwhile and go on as soon as the batch is there.
    """
    calls = trace.events["operator"] + trace.events["runtime"]
    pauses = difference([window], union(spans(e for e in calls if e.thread in threads)))
    begins = [begin for begin, _ in pauses]
    waits = []
    for event in loading:
        index = bisect_right(begins, event.end_us) - 1
        if index >= 0 and 0 <= pauses[index][1] - event.end_us <= HANDOVER_US:
            waits.append((max(pauses[index][0], event.begin_us), event.end_us))
    return _activity(loading, window, union(clip(waits, window)))


def _activity(
    events: list[TraceEvent], window: Interval, intervals: Intervals | None = None
) -> HostActivity:
    """Sum events; ``intervals`` is the part of them that counts, by default all."""
    taken: Counter[str] = Counter()
    whole = outermost(events)
    for event in whole:
        taken[event.name] += round(1000 * (event.end_us - event.begin_us))
    names = sorted(taken, key=lambda name: (-taken[name], name))
    if intervals is None:
        intervals = union(clip(spans(events), window))
    times = total(intervals), longest_us(intervals)
    return HostActivity(len(whole), *times, tuple(names[:_NAMES]), intervals)


def compiled_spans(regions: Sequence[TraceEvent], window: Interval) -> Intervals:
    """Return calls of compiled code with the Python between one and the next."""
    spans: Intervals = []
    for begin, end in sorted((e.begin_us, e.end_us) for e in regions):
        near = spans and begin - spans[-1][1] <= BOUNDARY_US
        spans.append((spans[-1][1] if near else begin, end))
    return union(clip(spans, window))
