"""Collectives take time that no compute hides."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis.comparison.alignment import Alignment, align, exposed_transfer_us
from warpwatch_diagnosis.measures.intervals import Intervals, total, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import Finding, idle, milliseconds, once, percent, times

# PyTorch's TensorBoard plugin warns above 10 % of the step.
MIN_EXPOSED_SHARE = 0.10
# On the CPU a collective works on the cores that the compute needs: a third of a step is common
# for small models that are well (our own value).
MIN_CPU_WAIT_SHARE = 0.40
HIGH_SHARE = 0.20
# TraceLens's target for what compute should hide.
GOOD_OVERLAP = 0.70
_SHOWN = 3


class CommunicationBound:
    kind = "communication_bound"
    supersedes: tuple[str, ...] = ()

    def share(self, measures: Measures) -> float | None:
        return measures.share(exposed(measures))

    def usual_shares(
        self, capture: Sequence[Measures], baseline: Sequence[Measures]
    ) -> list[float | None]:
        """What ``find`` judges, of the baseline; None where only one of them tells transfers from
        waiting."""
        alignment = align(baseline)
        if (align(capture) is None) != (alignment is None):
            return [None for _ in baseline]
        return [_share(_price_us(m, rank, alignment), m) for rank, m in enumerate(baseline)]

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        """The rank that waits least shows the true price; the others' surplus is waiting for it.

        One CPU trace alone cannot tell the two apart and brings no finding.
        """
        if not capture or (len(capture) == 1 and capture[0].gpu is None):
            return []
        alignment = align(capture)
        prices_us = [_price_us(m, rank, alignment) for rank, m in enumerate(capture)]
        rank = min(range(len(capture)), key=lambda rank: _share(prices_us[rank], capture[rank]))
        least = capture[rank]
        limit = MIN_EXPOSED_SHARE if least.gpu else MIN_CPU_WAIT_SHARE
        if _share(prices_us[rank], least) <= limit:
            return []
        return [_finding(self.kind, least, prices_us[rank], alignment)]


def _price_us(measures: Measures, rank: int, alignment: Alignment | None) -> float:
    """Exposed communication; where all ranks are known, without what is waiting for another."""
    if alignment is None:
        return total(exposed(measures))
    blocked = total(idle(measures, "communication"))
    return exposed_transfer_us(measures, rank, alignment) + blocked


def _share(price_us: float, measures: Measures) -> float:
    return min(1.0, price_us / measures.window_us) if measures.window_us else 0.0


@once
def exposed(measures: Measures) -> Intervals:
    """Collective kernels that run alone and idle time under collectives that block the host; on
    the CPU the training thread's wait for collectives."""
    if measures.gpu is not None:
        return union(measures.gpu.exposed_communication + idle(measures, "communication"))
    return measures.cpu.waiting if measures.cpu else []


def _finding(
    kind: str, measures: Measures, price_us: float, alignment: Alignment | None
) -> Finding:
    share = _share(price_us, measures)
    missing = _missing(measures, alignment)
    return Finding(
        kind=kind,
        rank=measures.rank,
        label=measures.label,
        share=share,
        recoverable_s=price_us / 1e6,
        confidence="high" if share > HIGH_SHARE and measures.gpu and not missing else "medium",
        evidence=(*_evidence(measures, share), *_bandwidths(alignment), *missing),
        advice=(
            "Let communication overlap with the backward pass: DistributedDataParallel with a "
            "tuned bucket_cap_mb and gradient_as_bucket_view=True, FSDP with forward_prefetch="
            "True, gradient accumulation under no_sync(); then check the links between ranks."
        ),
    )


def _missing(measures: Measures, alignment: Alignment | None) -> list[str]:
    """A rank that is late looks like slow communication to whoever lacks its trace."""
    sizes = [c.group_size or 0 for c in measures.gpu.collectives] if measures.gpu else []
    ranks = max(sizes, default=0)
    here = max((len(m.ranks) for m in alignment.meetings), default=1) if alignment else 1
    if ranks <= here:
        return []
    only = "only 1 is" if here == 1 else f"only {here} are"
    return [f"of {ranks} ranks {only} here: part of it may be waiting for one of the others"]


def _bandwidths(alignment: Alignment | None) -> list[str]:
    if alignment is None:
        return []
    return [
        f"{row['name']} of {row['bytes'] / 1e6:,.1f} MB ran {times(row['count'])} on "
        f"{row['ranks']} ranks: bus bandwidth {row['bus_gb_per_s']:,.1f} GB/s"
        for row in alignment.to_json()["by_name"][:_SHOWN]
        if row["bus_gb_per_s"] is not None
    ]


def _evidence(measures: Measures, share: float) -> list[str]:
    lost = exposed(measures)
    sentences = [f"{percent(share)} of the step is communication that no compute hides"]
    gpu, cpu = measures.gpu, measures.cpu
    overlap = gpu.overlap_ratio if gpu is not None else None
    if gpu is not None and overlap is not None:
        sentences.append(
            f"collective kernels run for {milliseconds(total(gpu.communication))}, "
            f"{milliseconds(total(lost))} of it alone; {percent(overlap)} is overlapped, "
            f"{percent(GOOD_OVERLAP)} is good"
        )
    if cpu is not None:
        sentences.append(
            f"the training thread waits {milliseconds(total(lost))} for "
            f"{', '.join(cpu.collectives)}, and no rank waits less"
        )
    return sentences
