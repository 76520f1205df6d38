"""Copies between host and device that no compute hides."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_diagnosis.measures.copies import CopyTime
from warpwatch_diagnosis.measures.intervals import Intervals, difference, total, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import RankRule, idle, milliseconds, percent, times

# PCIe 4 x16 moves about 25 GB/s from pinned memory; half of it is slow (reference value).
SLOW_GB_PER_S = 12.5
_SHOWN = 3


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
