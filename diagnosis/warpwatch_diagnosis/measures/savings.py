"""What each kind of fault costs: what the replay without it saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from warpwatch_diagnosis.measures.copies import copy_kind
from warpwatch_diagnosis.measures.gpu_time import TRANSFERS, GpuTime
from warpwatch_diagnosis.measures.host_events import HostTime
from warpwatch_diagnosis.measures.idle_causes import Cause
from warpwatch_diagnosis.measures.intervals import Interval, total, union
from warpwatch_diagnosis.measures.kernels import classify
from warpwatch_diagnosis.measures.replay import Edit, Replay
from warpwatch_diagnosis.measures.synchronization import BlockingCall
from warpwatch_diagnosis.trace.events import Event

# Below every rule's limit: what costs less is no finding.
MIN_SHARE = 0.01


def savings(
    work: Sequence[Event],
    calls: Mapping[int | None, Event],
    waits: Sequence[BlockingCall],
    window: Interval,
    host: HostTime,
    gpu: GpuTime,
) -> dict[str, float]:
    """By kind of finding, in µs; empty where the trace's graph is not understood.

    ``work``: of the judged device, by its begin.
    """
    least_us = MIN_SHARE * (window[1] - window[0])
    edits = [(kinds, edit) for kinds, us, edit in _edits(host, gpu) if us > least_us]
    replay = Replay(work, calls, waits, window) if edits else None
    if replay is None or not replay.is_exact:
        return {}
    return {kind: us for kinds, edit in edits for us in [replay.saving_us(edit)] for kind in kinds}


def _edits(host: HostTime, gpu: GpuTime) -> Iterator[tuple[tuple[str, ...], float, Edit]]:
    """The kinds that a fault has, what it seems to cost in µs, and the trace without it."""

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
    yield ("transfer_bound",), copies_us, Edit(waits=frozenset({"copy"}), work=_crosses)
    alone_us = total(gpu.exposed_communication)
    yield ("communication_bound",), alone_us, Edit(work=_communicates)
    named = union(span for _, spans in host.by_cause() for span in spans)
    late_us = idle_us("host", "dispatch", "launch")
    yield ("host_bound", "launch_bound"), late_us, Edit(named, keep=True)


def _crosses(name: str) -> bool:
    return copy_kind(name)[0] in TRANSFERS


def _communicates(name: str) -> bool:
    return classify(name) == "communication"
