"""Predicts the time that a fault costs: runs the trace's graph of events again without it.

A call of the host (a launch, or a wait for the device) begins some time after the call that ended
last before it. Work of the device begins when its launch has reached it, the previous work on its
stream is done, and so is the work of another stream that it was seen to wait for (which ended at
most KERNEL_GAP_US earlier). A wait ends with the work that it waited for. Every distance that the
graph does not explain stays, so that the run without an edit gives the trace's own times (as in
Daydream, ATC 2020, and the critical path of Holistic Trace Analysis).

The graph has neither the limit of the launch queue nor the slowdown of concurrent kernels.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from warpwatch_diagnosis.intervals import Interval, Intervals, total, union
from warpwatch_diagnosis.measures.gpu_time import TRANSFERS, GpuTime
from warpwatch_diagnosis.measures.gpu_work import GpuWork, classify, copy_kind
from warpwatch_diagnosis.measures.host_events import Cause, HostTime
from warpwatch_diagnosis.measures.idle import KERNEL_GAP_US, LEAD_US
from warpwatch_diagnosis.measures.runtime_calls import BlockingCall
from warpwatch_diagnosis.trace.events import RuntimeCalls, TraceEvent

# Typical times from a launch call to the device and from one kernel to the next, used if the trace
# does not show them because something else was later.
LAUNCH_US = 5.0
BETWEEN_KERNELS_US = 1.0
# A wait returns this soon after the work that it waited for.
AFTER_WAIT_US = 100.0
# Beyond this difference to the trace the graph is wrong (the limit that the OSDI 2025 study of
# stragglers uses for its simulations).
MAX_ERROR = 0.05
# A fault that seems to cost less is below every rule's limit.
MIN_APPARENT_SHARE = 0.01
_LOOK_BACK = 8


@dataclass(slots=True)
class Edit:
    """The part of a trace that a replay leaves out.

    intervals: time of the host, with the launches in it; with ``keep``, all time but this. waits:
    purposes of waits that return at once. work: names of device work that takes no time.
    """

    intervals: Intervals = field(default_factory=list)
    keep: bool = False
    waits: frozenset[str] = frozenset()
    work: Callable[[str], bool] | None = None


@dataclass(slots=True)
class _HostCall:
    begin_us: float
    end_us: float
    purpose: str = ""
    work: list[int] = field(default_factory=list)


class TraceReplay:
    """The graph of one device's ``work`` in the window; see the module."""

    def __init__(self, work: GpuWork, waits: Sequence[BlockingCall]) -> None:
        calls, self._window = work.calls, work.window
        low, high = work.window
        self._work = [
            e
            for e in work.events
            if (e.begin_us < high and e.end_us > low)
            or ((launch := calls.get(e.correlation)) and low <= launch.begin_us < high)
        ]
        self._host = _host(self._work, calls, waits, work.window)
        self._ends = sorted((e.end_us, k) for k, e in enumerate(self._work))
        self._launched_by = [0] * len(self._work)
        for index, call in enumerate(self._host):
            for k in call.work:
                self._launched_by[k] = index
        # By call: the call before it, and the time between them.
        self._before, self._gaps = [0], [0.0]
        self._follow_host()
        # By work: its stream, the work of another stream before it (else -1), the time from its
        # launch, and the pause after the work before it; in µs.
        self._stream: list[int] = []
        self._joins: list[int] = []
        self._ways: list[float] = []
        self._pauses: list[float] = []
        self._follow_device()
        self._awaited = [self._work_awaited(index) for index in range(len(self._host))]
        self._took = [e.end_us - max(e.begin_us, self._window[0]) for e in self._work]
        self._base = self._run(Edit())

    def saving_us(self, edit: Edit) -> float:
        """Return how much sooner host and device are done; at least 0."""
        return max(0.0, self._base - self._run(edit))

    @property
    def is_exact(self) -> bool:
        """Whether the run without an edit takes as long as the trace."""
        low, high = self._window
        last = max([high, *(e.end_us for e in self._work)])
        return abs(self._base - last) <= MAX_ERROR * (last - low)

    def _follow_host(self) -> None:
        running: list[tuple[float, int]] = []
        last = 0
        for index, call in enumerate(self._host[1:], 1):
            while running and running[0][0] <= call.begin_us:
                last = heapq.heappop(running)[1]
            self._before.append(last)
            self._gaps.append(max(0.0, call.begin_us - self._host[last].end_us))
            heapq.heappush(running, (call.end_us, index))

    def _follow_device(self) -> None:
        streams: dict[str, int] = {}
        done: dict[int, float] = defaultdict(lambda: self._window[0])
        for k, event in enumerate(self._work):
            stream = streams.setdefault(event.thread, len(streams))
            begin_us, before_us = max(event.begin_us, self._window[0]), done[stream]
            launch_us = self._host[self._launched_by[k]].begin_us
            join = -1
            if begin_us - max(before_us, launch_us) > KERNEL_GAP_US and len(streams) > 1:
                join = self._work_before(k, begin_us)
                before_us = self._work[join].end_us if join >= 0 else before_us
            way_us, pause_us = begin_us - launch_us, begin_us - before_us
            queued = launch_us + LEAD_US < begin_us and launch_us <= before_us
            if queued or pause_us <= KERNEL_GAP_US:
                way_us = min(way_us, LAUNCH_US)
            else:
                pause_us = BETWEEN_KERNELS_US
            self._stream.append(stream)
            self._joins.append(join)
            self._ways.append(max(0.0, way_us))
            self._pauses.append(max(0.0, pause_us))
            done[stream] = max(done[stream], event.end_us)

    def _work_before(self, k: int, begin_us: float) -> int:
        at = bisect_right(self._ends, (begin_us, k))
        for end_us, other in self._ends[max(0, at - _LOOK_BACK) : at][::-1]:
            if begin_us - end_us > KERNEL_GAP_US:
                break
            if self._launched_by[other] <= self._launched_by[k] and other < k:
                return other
        return -1

    def _work_awaited(self, index: int) -> int:
        """Return the work that a wait waited for, or -1."""
        call = self._host[index]
        if not call.purpose:
            return -1
        at = bisect_right(self._ends, (call.end_us, len(self._work)))
        for end_us, k in self._ends[max(0, at - _LOOK_BACK) : at][::-1]:
            if end_us <= call.begin_us or call.end_us - end_us > AFTER_WAIT_US:
                break
            if self._launched_by[k] <= index:
                return k
        return -1

    def _run(self, edit: Edit) -> float:
        """Return the time at which the host and the device are done."""
        gaps, gone = self._edited(edit)
        work, stream, joins = self._work, self._stream, self._joins
        pauses, took = self._pauses, self._took
        # The time from a launch includes the call, which is the host's.
        ways = [min(us, LAUNCH_US) for us in self._ways] if edit.keep else self._ways
        ended = [0.0] * len(work)
        done = [self._window[0]] * (max(stream, default=0) + 1)
        host_ends: list[float] = []
        names = {e.name for e in work} if edit.work else ()
        instant = {name for name in names if edit.work and edit.work(name)}
        for index, call in enumerate(self._host):
            before = host_ends[self._before[index]] if index else self._window[0]
            at = before + gaps[index]
            absent = gone[index]
            for k in call.work:
                s, join = stream[k], joins[k]
                begin = done[s] + pauses[k]
                if join >= 0 and ended[join] + pauses[k] > begin:
                    begin = ended[join] + pauses[k]
                if at + ways[k] > begin:
                    begin = at + ways[k]
                if absent or (instant and work[k].name in instant):
                    begin = done[s]
                else:
                    begin += took[k]
                done[s] = ended[k] = begin
            awaited = self._awaited[index]
            returns_at_once = call.purpose and call.purpose in edit.waits
            if absent or returns_at_once or (edit.keep and awaited < 0):
                host_ends.append(at)
            elif awaited >= 0:
                late = call.end_us - work[awaited].end_us
                host_ends.append(max(at, ended[awaited]) + late)
            else:
                host_ends.append(at + call.end_us - call.begin_us)
        return max(max(host_ends), *done)

    def _edited(self, edit: Edit) -> tuple[list[float], list[bool]]:
        """Return the time before each call, and whether the edit leaves the call out."""
        gone = [False] * len(self._host)
        begins = [call.begin_us for call in self._host]
        gaps = [0.0] * len(begins) if edit.keep else list(self._gaps)
        for low, high in edit.intervals:
            index = bisect_right(begins, low)
            while index < len(begins):
                end_us = begins[index]
                begin_us = end_us - self._gaps[index]
                if begin_us >= high:
                    break
                shared = max(0.0, min(end_us, high) - max(begin_us, low))
                gaps[index] += shared if edit.keep else -shared
                gone[index] = not edit.keep and end_us < high
                index += 1
        return gaps, gone


def _host(
    work: Sequence[TraceEvent], calls: RuntimeCalls, waits: Sequence[BlockingCall], window: Interval
) -> list[_HostCall]:
    """Return the calls by begin, between two calls for the window's begin and end.

    The first one launches the work without a launch in the window.
    """
    low, high = window
    found = {(w.thread, w.begin_us): _HostCall(w.begin_us, w.end_us, w.purpose) for w in waits}
    found = {key: call for key, call in found.items() if low <= call.begin_us < high}
    first = _HostCall(low, low)
    orphans = []
    for k, event in enumerate(work):
        call = calls.get(event.correlation)
        if call is None:
            orphans.append(k)
        elif call.begin_us < low:
            first.work.append(k)
        else:
            key = call.thread, call.begin_us
            if key not in found:
                found[key] = _HostCall(call.begin_us, call.end_us)
            found[key].work.append(k)
    host = [first, *sorted(found.values(), key=lambda c: (c.begin_us, c.end_us))]
    begins = [call.begin_us for call in host]
    for k in orphans:
        host[max(0, bisect_right(begins, work[k].begin_us) - 1)].work.append(k)
    for each in host:
        each.work.sort()
    return [*host, _HostCall(high, high)]


def savings(
    work: GpuWork, waits: Sequence[BlockingCall], host: HostTime, gpu: GpuTime
) -> dict[str, float]:
    """Return the savings of the device with ``work`` in µs by kind; empty if the graph is wrong."""
    least_us = MIN_APPARENT_SHARE * (work.window[1] - work.window[0])
    edits = [(kinds, edit) for kinds, us, edit in _edits(host, gpu) if us > least_us]
    replay = TraceReplay(work, waits) if edits else None
    if replay is None or not replay.is_exact:
        return {}
    return {kind: us for kinds, edit in edits for us in [replay.saving_us(edit)] for kind in kinds}


def _edits(host: HostTime, gpu: GpuTime) -> Iterator[tuple[tuple[str, ...], float, Edit]]:
    """Yield the kinds of each fault, its apparent cost in µs, and the edit that removes it."""

    def idle_us(*causes: Cause) -> float:
        return sum(gpu.idle_time.total_us(cause) for cause in causes)

    yield ("data_loading",), idle_us("data_loading"), Edit(host.loading.intervals)
    yield ("gc_pause",), idle_us("gc"), Edit(host.gc.intervals)
    yield ("checkpoint",), idle_us("checkpoint"), Edit(host.checkpoint.intervals)
    yield ("allocator_thrash",), idle_us("allocator"), Edit(host.allocator.intervals)
    if not host.compiled_spans:
        yield ("recompilation",), idle_us("compile"), Edit(host.compile.intervals)
    values = frozenset({"read", "wait"})
    yield ("sync_bound",), idle_us("synchronization"), Edit(waits=values)
    copies_us = idle_us("copy") + total(gpu.exposed_transfers)
    crosses = Edit(waits=frozenset({"copy"}), work=lambda name: copy_kind(name)[0] in TRANSFERS)
    yield ("transfer_bound",), copies_us, crosses
    communicates = Edit(work=lambda name: classify(name) == "communication")
    yield ("communication_bound",), total(gpu.exposed_communication), communicates
    named = union(span for _, spans in host.by_cause() for span in spans)
    late_us = idle_us("host", "dispatch", "launch")
    yield ("host_bound", "launch_bound"), late_us, Edit(named, keep=True)
