"""The host waits for the device and the device then waits for the host: `.item()` in the loop.

A long wait while the device works costs nothing by itself. What counts is the idle time after it:
the host had no work queued and must build its lead again (idle.py). Without a GPU nothing waits for
a device, but loops that read value after value would wait for one each time.
"""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_diagnosis.measures.copies import CopyTime
from warpwatch_diagnosis.measures.intervals import Intervals, difference, total, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.measures.runtime_calls import SynchronizingCall
from warpwatch_diagnosis.rules.base import (
    RankRule,
    idle,
    milliseconds,
    percent,
    short,
    times,
    worst_gaps,
)
from warpwatch_diagnosis.rules.host_bound import reading

# Without a GPU; as for the host's own time.
HIGH_CPU_SHARE = 0.20
_SHOWN = 3


class SyncBoundRule(RankRule):
    kind = "sync_bound"
    # Idle time after synchronizing calls (reference value of this project).
    min_share = 0.05
    high_share = 0.15

    def lost(self, measures: Measures) -> Intervals:
        return idle(measures, "synchronization") if measures.gpu else reading(measures)

    def is_sure(self, measures: Measures, lost: Intervals) -> bool:
        return measures.share(lost) > (self.high_share if measures.gpu else HIGH_CPU_SHARE)

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        return _waits(measures, lost) if measures.gpu else _loops(measures, lost)

    def advice(self, measures: Measures) -> str:
        if measures.gpu is None:
            return (
                "Do not look at tensors value by value: sum, compare and count in tensors and read "
                "one result, .tolist() copies all values at once; read metrics every 50 steps."
            )
        calls = _culprits(measures)
        line = next((f" ({call.place})" for call in calls if call.place), "")
        if any(call.purpose == "read" for call in calls):
            return (
                f"Do not read values of the GPU in every step{line}: keep losses and metrics as "
                "tensors and call .item() every 50 steps, copy with non_blocking=True, avoid "
                'boolean indexing and nonzero; torch.cuda.set_sync_debug_mode("warn") names every '
                "place."
            )
        return (
            f"Remove torch.cuda.synchronize() and stream or event waits from the loop{line}; "
            "measure with CUDA events instead, and let the host run ahead of the GPU."
        )


def _loops(measures: Measures, lost: Intervals) -> Iterator[str]:
    found = measures.synchronization
    a_step = found.count / measures.step_count
    yield (
        f"{percent(measures.share(lost))} of the step is loops that read one value after the other"
    )
    yield (
        f"{a_step:,.0f} values are read a step (.item(), float(), bool() of a tensor); the loops "
        f"take {milliseconds(total(lost))} together"
    )
    # What a read takes by itself says nothing here.
    for call in sorted(found.calls, key=lambda call: -call.count)[:_SHOWN]:
        if call.place:
            yield f"{call.name} at {call.place} ran {times(call.count)}"


def _culprits(measures: Measures) -> list[SynchronizingCall]:
    """Calls that wait for a value or for the device, not those that move data."""
    calls = measures.synchronization.calls
    return [c for c in calls if c.purpose != "copy"][:_SHOWN]


def _waits(measures: Measures, lost: Intervals) -> Iterator[str]:
    yield (
        f"the GPU is idle for {percent(measures.share(lost))} of the step because the host waited "
        "for it and had nothing queued afterwards"
    )
    for call in _culprits(measures):
        under = f" under {short(call.operator)}" if call.operator else ""
        at = f" at {call.place}" if call.place else ""
        yield (
            f"{short(call.name)}{under}{at} waited {times(call.count)} for "
            f"{milliseconds(call.total_us)} together, {milliseconds(call.longest_us)} at most"
        )
    found = measures.synchronization
    if found.per_step:
        yield f"{found.count / len(found.per_step):,.1f} synchronizing calls a step"
    yield from worst_gaps(measures, "synchronization")


# PCIe 4 x16 moves about 25 GB/s from pinned memory; half of it is slow (reference value).
SLOW_GB_PER_S = 12.5


class TransferBoundRule(RankRule):
    kind = "transfer_bound"
    # TraceLens flags exposed copies above this share of the step.
    min_share = 0.05
    high_share = 0.15
    needs_gpu = True

    def lost(self, measures: Measures) -> Intervals:
        """Exposed copies and the idle time for them; a checkpoint's copies are its own."""
        transfers = measures.gpu.exposed_transfers if measures.gpu else []
        exposed = difference(transfers, measures.host.checkpoint.intervals)
        return union(exposed + idle(measures, "copy"))

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        share, waiting_us = percent(measures.share(lost)), total(idle(measures, "copy"))
        yield f"{share} of the step is copies between host and GPU that no compute hides"
        yield from (_sentence(copy) for copy in _crossing(measures) if copy.exposed_us)
        if waiting_us:
            yield f"the GPU stood idle for {milliseconds(waiting_us)} around them"
        calls = [c for c in measures.synchronization.calls if c.purpose == "copy"]
        lines = list(dict.fromkeys(c.place for c in calls if c.place))
        if lines:
            yield f"the host waits for copies at {', '.join(lines[:_SHOWN])}"

    def advice(self, measures: Measures) -> str:
        copies = _crossing(measures)
        if any(c.memory == "pageable" for c in copies):
            return (
                "Set DataLoader(pin_memory=True) and copy with tensor.to(device, "
                "non_blocking=True): a copy from pageable memory blocks the host and runs at a "
                "fraction of the bandwidth. Send small types (uint8 images) and convert them on "
                "the GPU."
            )
        if any((c.bandwidth_gb_per_s or SLOW_GB_PER_S) < SLOW_GB_PER_S for c in copies):
            return (
                "The bus is slow for pinned memory: copy fewer, larger tensors, send small types, "
                "and check the link (nvidia-smi -q: PCIe generation and width, NUMA node of the "
                "process)."
            )
        return (
            "Copy the next batch on a stream of its own with non_blocking=True while the current "
            "one is trained, keep on the GPU what comes back to it, and send small types (uint8)."
        )


def _crossing(measures: Measures) -> list[CopyTime]:
    copies = measures.gpu.copy_times if measures.gpu else ()
    crossing = [c for c in copies if c.direction in ("HtoD", "DtoH")]
    return sorted(crossing, key=lambda c: -c.exposed_us)[:_SHOWN]


def _sentence(copy: CopyTime) -> str:
    side = "from" if copy.direction == "HtoD" else "to"
    memory = f" {side} {copy.memory} memory" if copy.memory else ""
    text = (
        f"{copy.direction}{memory} ran {times(copy.count)} for {milliseconds(copy.busy_us)}, "
        f"{milliseconds(copy.exposed_us)} of it alone"
    )
    rate = copy.bandwidth_gb_per_s
    return f"{text}: {copy.bytes / 1e6:,.1f} MB at {rate:.1f} GB/s" if copy.bytes and rate else text
