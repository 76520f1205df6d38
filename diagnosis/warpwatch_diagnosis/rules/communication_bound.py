"""Finds collectives whose time no compute hides."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_diagnosis.alignment import Alignment, align, slow_links
from warpwatch_diagnosis.intervals import Intervals, total, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import Capture, DiagnosisRule, Finding, advice, idle
from warpwatch_diagnosis.words import milliseconds, percent, times

# PyTorch's TensorBoard plugin warns above 10 % of the step.
MIN_EXPOSED_SHARE = 0.10
# On the CPU a collective works on the cores that the compute needs: a third of a step is common
# for healthy small models (our own value).
MIN_CPU_WAIT_SHARE = 0.40
HIGH_EXPOSED_SHARE = 0.20
# TraceLens's target for the share that compute hides.
GOOD_OVERLAP = 0.70
_SHOWN = 3


class CommunicationBoundRule(DiagnosisRule):
    kind = "communication_bound"

    def find(self, capture: Capture, alignment: Alignment | None) -> list[Finding]:
        """Report the rank that waits least: the others' surplus is waiting for it.

        In a single CPU trace both look the same, so there is no finding.
        """
        if not capture or (len(capture) == 1 and capture[0].gpu is None):
            return []
        costs_us = [_cost_us(m, alignment) for m in capture]
        shares = [m.share_of_us(us) for us, m in zip(costs_us, capture, strict=True)]
        rank = min(range(len(capture)), key=lambda rank: shares[rank])
        least, share = capture[rank], shares[rank]
        if share <= (MIN_EXPOSED_SHARE if least.gpu else MIN_CPU_WAIT_SHARE):
            return []
        missing, links = _missing(least, alignment), slow_links(capture, alignment)
        return [
            self.finding(
                least,
                share=share,
                recoverable_us=min(costs_us[rank], least.savings.get(self.kind, costs_us[rank])),
                confidence="high"
                if share > HIGH_EXPOSED_SHARE and least.gpu is not None and not missing
                else "medium",
                evidence=(*_evidence(least, share), *_bandwidths(alignment), *links, *missing),
                advice=advice(self.kind),
            )
        ]

    def usual_shares(self, baseline: Capture, alignment: Alignment | None) -> list[float]:
        """Return the costs; empty if transfers and waiting are separate in only one of the two."""
        usual = align(baseline)
        if (alignment is None) != (usual is None):
            return []
        return [m.share_of_us(_cost_us(m, usual)) for m in baseline]


def exposed(measures: Measures) -> Intervals:
    """Return the time of collectives that compute does not hide.

    On the GPU this is the time of collective kernels alone and idle time under collectives that
    block the host, on the CPU the training thread's wait for collectives.
    """
    if measures.gpu is not None:
        return union(measures.gpu.exposed_communication + idle(measures, "communication"))
    return measures.cpu.waiting if measures.cpu else []


def _cost_us(measures: Measures, alignment: Alignment | None) -> float:
    """Return the exposed communication, with all ranks known without waiting for another one."""
    if alignment is None:
        return total(exposed(measures))
    blocked = total(idle(measures, "communication"))
    return alignment.exposed_transfer_us(measures) + blocked


def _missing(measures: Measures, alignment: Alignment | None) -> list[str]:
    """Return a clause if ranks are missing: their lateness looks like slow communication."""
    sizes = [c.group_size or 0 for c in measures.gpu.collectives] if measures.gpu else []
    ranks = max(sizes, default=0)
    here = max((len(m.ranks) for m in alignment.matched), default=1) if alignment else 1
    if ranks <= here:
        return []
    only = "only 1 is" if here == 1 else f"only {here} are"
    return [f"of {ranks} ranks {only} here: part of it may be waiting for one of the others"]


def _bandwidths(alignment: Alignment | None) -> Iterator[str]:
    for row in alignment.by_name()[:_SHOWN] if alignment else ():
        if row["bus_gb_per_s"] is not None:
            yield (
                f"{row['name']} of {row['bytes'] / 1e6:,.1f} MB ran {times(row['count'])} on "
                f"{row['ranks']} ranks: bus bandwidth {row['bus_gb_per_s']:,.1f} GB/s"
            )


def _evidence(measures: Measures, share: float) -> Iterator[str]:
    gpu, cpu = measures.gpu, measures.cpu
    yield f"{percent(share)} of the step is communication that no compute hides"
    if gpu is not None and gpu.overlap_ratio is not None:
        alone = milliseconds(total(gpu.exposed_communication))
        yield (
            f"collective kernels run for {milliseconds(total(gpu.communication))}, {alone} of it "
            f"alone; {percent(gpu.overlap_ratio)} is overlapped, {percent(GOOD_OVERLAP)} is good"
        )
    if blocked_us := total(idle(measures, "communication")):
        yield f"the GPU is idle for {milliseconds(blocked_us)} while a collective blocks the host"
    if cpu is not None:
        waits, names = milliseconds(total(cpu.waiting)), ", ".join(cpu.collectives)
        yield f"the training thread waits {waits} for {names}, and no rank waits less"
