"""Finds steps in which host and device wait for each other: synchronizing calls, and copies."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_diagnosis.advice import advice
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

# The limit without a GPU, as for the host's own time.
HIGH_CPU_SHARE = 0.20
# PCIe 4 x16 moves about 25 GB/s from pinned memory; half of it is slow (reference value).
SLOW_GB_PER_S = 12.5
_SHOWN = 3


class SyncBoundRule(RankRule):
    """Finds a host that waits for the device, which then waits for the host: `.item()` in the loop.

    A long wait while the device works does not affect the step. The idle time after it counts: the
    host had no work queued and must build its lead again. Without a GPU nothing waits for a device,
    but loops that read value after value would wait for one each time.
    """

    kind = "sync_bound"
    # The limit on idle time after synchronizing calls (reference value of this project).
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
            return advice(self.kind, "cpu")
        calls = _culprits(measures)
        line = next((f" ({call.place})" for call in calls if call.place), "")
        reads = any(call.purpose == "read" for call in calls)
        return advice(self.kind, "read" if reads else "wait", line=line)


def _loops(measures: Measures, lost: Intervals) -> Iterator[str]:
    found = measures.synchronization
    yield (
        f"{percent(measures.share(lost))} of the step is loops that read one value after the other"
    )
    yield (
        f"{found.count / measures.step_count:,.0f} values are read a step (.item(), float(), bool()"
        f" of a tensor); the loops take {milliseconds(total(lost))} together"
    )
    # The count shows the loop: a single read takes no time of its own.
    for call in sorted(found.calls, key=lambda call: -call.count)[:_SHOWN]:
        if call.place:
            yield f"{call.name} at {call.place} ran {times(call.count)}"


def _culprits(measures: Measures) -> list[SynchronizingCall]:
    """Return the longest calls that wait for a value or for the device, not for copied data."""
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


class TransferBoundRule(RankRule):
    """Finds copies between host and device that no compute hides."""

    kind = "transfer_bound"
    # TraceLens flags exposed copies above this share of the step.
    min_share = 0.05
    high_share = 0.15
    needs_gpu = True

    def lost(self, measures: Measures) -> Intervals:
        """Return exposed copies and the idle time for them, without those of a checkpoint."""
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
        slow = any((c.bandwidth_gb_per_s or SLOW_GB_PER_S) < SLOW_GB_PER_S for c in copies)
        if any(c.memory == "pageable" for c in copies):
            return advice(self.kind, "pageable")
        return advice(self.kind, "bus" if slow else "stream")


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
