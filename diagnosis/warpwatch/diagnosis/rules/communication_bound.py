"""Collectives take time that no compute hides."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch.diagnosis.intervals import Intervals, total
from warpwatch.diagnosis.measures import Measures
from warpwatch.diagnosis.rules.base import Finding, milliseconds, percent

# PyTorch's TensorBoard plugin warns above 10 % of the step.
MIN_EXPOSED_SHARE = 0.10
# On the CPU a collective works on the cores that the compute needs: a third of a step is common
# for small models that are well (our own value).
MIN_CPU_WAIT_SHARE = 0.40
HIGH_SHARE = 0.20
# TraceLens's target for what compute should hide.
GOOD_OVERLAP = 0.70


class CommunicationBound:
    kind = "communication_bound"
    supersedes: tuple[str, ...] = ()

    def share(self, measures: Measures) -> float | None:
        return measures.share(exposed(measures))

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        """The rank that waits least shows the true price; the others' surplus is waiting for it.

        One CPU trace alone cannot tell the two apart and brings no finding.
        """
        if not capture or (len(capture) == 1 and capture[0].gpu is None):
            return []
        least = min(capture, key=lambda m: m.share(exposed(m)))
        limit = MIN_EXPOSED_SHARE if least.gpu else MIN_CPU_WAIT_SHARE
        return [_finding(self.kind, least)] if least.share(exposed(least)) > limit else []


def exposed(measures: Measures) -> Intervals:
    """Collective kernels that run alone; on the CPU the training thread's wait for collectives."""
    if measures.gpu is not None:
        return measures.gpu.exposed_communication
    return measures.cpu.waiting if measures.cpu else []


def _finding(kind: str, measures: Measures) -> Finding:
    lost = exposed(measures)
    share = measures.share(lost)
    return Finding(
        kind=kind,
        rank=measures.rank,
        label=measures.label,
        share=share,
        recoverable_s=total(lost) / 1e6,
        confidence="high" if share > HIGH_SHARE and measures.gpu else "medium",
        evidence=tuple(_evidence(measures, lost)),
        advice=(
            "Let communication overlap with the backward pass: DistributedDataParallel with a "
            "tuned bucket_cap_mb and gradient_as_bucket_view=True, FSDP with forward_prefetch="
            "True, gradient accumulation under no_sync(); then check the links between ranks."
        ),
    )


def _evidence(measures: Measures, lost: Intervals) -> list[str]:
    share = percent(measures.share(lost))
    sentences = [f"{share} of the step is communication that no compute hides"]
    gpu, cpu = measures.gpu, measures.cpu
    if gpu is not None and gpu.overlap_ratio is not None:
        sentences.append(
            f"collective kernels run for {milliseconds(total(gpu.communication))}, "
            f"{milliseconds(total(lost))} of it alone; {percent(gpu.overlap_ratio)} is overlapped, "
            f"{percent(GOOD_OVERLAP)} is good"
        )
    if cpu is not None:
        sentences.append(
            f"the training thread waits {milliseconds(total(lost))} for "
            f"{', '.join(cpu.collectives)}, and no rank waits less"
        )
    return sentences
