"""Copies between host and device that no compute hides."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis.measures.copies import CopyTime
from warpwatch_diagnosis.measures.intervals import Intervals, difference, total, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import Finding, idle, milliseconds, percent, times

# TraceLens flags exposed copies above this share of the step.
MIN_SHARE = 0.05
HIGH_SHARE = 0.15
# PCIe 4 x16 moves about 25 GB/s from pinned memory; half of it is slow (reference value).
SLOW_GB_PER_S = 12.5
_SHOWN = 3


class TransferBound:
    kind = "transfer_bound"
    supersedes: tuple[str, ...] = ()

    def share(self, measures: Measures) -> float | None:
        return measures.share(_lost(measures)) if measures.gpu else None

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        return [self._finding(m) for m in capture if _applies(m)]

    def _finding(self, measures: Measures) -> Finding:
        lost = _lost(measures)
        share = measures.share(lost)
        copies = _exposed(measures)
        return Finding(
            kind=self.kind,
            rank=measures.rank,
            label=measures.label,
            share=share,
            recoverable_s=total(lost) / 1e6,
            confidence="high" if share > HIGH_SHARE else "medium",
            evidence=tuple(_evidence(measures, share, copies)),
            advice=_advice(copies),
        )


def _applies(measures: Measures) -> bool:
    return measures.gpu is not None and measures.share(_lost(measures)) > MIN_SHARE


def _lost(measures: Measures) -> Intervals:
    """Exposed copies and the idle time that waiting for them brings; a checkpoint's are its own."""
    if measures.gpu is None:
        return []
    exposed = difference(measures.gpu.exposed_transfers, measures.host.checkpoint.intervals)
    return union(exposed + idle(measures, "copy"))


def _exposed(measures: Measures) -> list[CopyTime]:
    copies = measures.gpu.copy_times if measures.gpu else ()
    crossing = [c for c in copies if c.direction in ("HtoD", "DtoH")]
    return sorted(crossing, key=lambda c: -c.exposed_us)[:_SHOWN]


def _evidence(measures: Measures, share: float, copies: list[CopyTime]) -> list[str]:
    waiting = total(idle(measures, "copy"))
    sentences = [
        f"{percent(share)} of the step is copies between host and GPU that no compute hides"
    ]
    sentences += [_sentence(copy) for copy in copies if copy.exposed_us]
    if waiting:
        sentences.append(f"the GPU stood idle for {milliseconds(waiting)} around them")
    places = {c.place: None for c in measures.synchronization.calls if c.purpose == "copy"}
    named = [place for place in places if place]
    if named:
        sentences.append(f"the host waits for copies at {', '.join(named[:_SHOWN])}")
    return sentences


def _sentence(copy: CopyTime) -> str:
    kind = (
        f"{copy.direction} from {copy.memory} memory"
        if copy.direction == "HtoD"
        else (f"{copy.direction} to {copy.memory} memory")
    )
    if copy.memory is None:
        kind = copy.direction
    text = f"{kind} ran {times(copy.count)} for {milliseconds(copy.busy_us)}, "
    text += f"{milliseconds(copy.exposed_us)} of it alone"
    rate = copy.bandwidth_gb_per_s
    if copy.bytes and rate:
        text += f": {copy.bytes / 1e6:,.1f} MB at {rate:.1f} GB/s"
    return text


def _advice(copies: list[CopyTime]) -> str:
    if any(c.memory == "pageable" for c in copies):
        return (
            "Set DataLoader(pin_memory=True) and copy with tensor.to(device, non_blocking=True): "
            "a copy from pageable memory blocks the host and runs at a fraction of the bandwidth. "
            "Send small types (uint8 images) and convert them on the GPU."
        )
    if any((c.bandwidth_gb_per_s or SLOW_GB_PER_S) < SLOW_GB_PER_S for c in copies):
        return (
            "The bus is slow for pinned memory: copy fewer, larger tensors, send small types, and "
            "check the link (nvidia-smi -q: PCIe generation and width, NUMA node of the process)."
        )
    return (
        "Copy the next batch on a stream of its own with non_blocking=True while the current one "
        "is trained, keep on the GPU what comes back to it, and send small types (uint8)."
    )
