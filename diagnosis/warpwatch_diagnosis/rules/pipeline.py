"""One stage of a pipeline computes longer than the others, which wait for it in every step."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from warpwatch_diagnosis.comparison.alignment import Alignment
from warpwatch_diagnosis.measures.intervals import difference, total, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import DiagnosisRule, Finding, milliseconds, percent

# What hands activations and gradients from stage to stage: torch.distributed's and NCCL's names.
_BETWEEN_STAGES = re.compile(r"send|recv", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Stage:
    """``busiest``: of its ranks; ``busy_us``: the median of its ranks, of one step."""

    number: int
    busiest: Measures
    busy_us: float


def stages(capture: Sequence[Measures]) -> list[Stage]:
    """In order; nothing unless each stage of the pipeline has a rank in the capture."""
    members: dict[int, list[Measures]] = defaultdict(list)
    sizes = {m.stage[1] if m.stage else 1 for m in capture}
    for measures in capture:
        members[measures.stage[0] if measures.stage else 0].append(measures)
    if len(sizes) != 1 or len(members) < 2 or {*members} != {*range(*sizes)}:
        return []
    return [
        Stage(number, max(some, key=_busy_us), median(map(_busy_us, some)))
        for number, some in sorted(members.items())
    ]


def _busy_us(measures: Measures) -> float:
    """What the rank computes in a step; on the CPU all that is no waiting for data or others."""
    if measures.gpu is not None:
        return total(measures.gpu.compute) / measures.step_count
    waiting = union(measures.loading + (measures.cpu.waiting if measures.cpu else []))
    return (measures.window_us - total(waiting)) / measures.step_count


def waits_for_stages_us(measures: Measures) -> float:
    """In the window, for what other stages hand over, while nothing is computed."""
    if measures.gpu is not None:
        handed = [
            (max(c.begin_us, measures.window[0]), min(c.end_us, measures.window[1]))
            for c in measures.gpu.collectives
            if _BETWEEN_STAGES.search(c.name) and c.begin_us < measures.window[1]
        ]
        return total(difference(union(handed), measures.gpu.compute))
    if measures.cpu is None or not any(map(_BETWEEN_STAGES.search, measures.cpu.collectives)):
        return 0.0
    return total(measures.cpu.waiting)


# Of the step. A 1F1B schedule of p stages and m micro-batches waits (p - 1) / (m + p - 1) of it
# (Narayanan et al., 2104.04473): 10 % is nine micro-batches for each further stage.
MIN_BUBBLE_SHARE = 0.10
HIGH_BUBBLE_SHARE = 0.20
# Twice the micro-batches have about half of the bubble.
RECOVERABLE = 0.5


class PipelineBubbleRule(DiagnosisRule):
    kind = "pipeline_bubble"
    supersedes = ("communication_bound",)

    def find(self, capture: Sequence[Measures], alignment: Alignment | None) -> list[Finding]:
        """The busiest stage waits for no slower one, so that its waiting is the bubble."""
        if not (known := stages(capture)):
            return []
        stage = max(known, key=lambda stage: stage.busy_us)
        waits_us = waits_for_stages_us(stage.busiest)
        share = stage.busiest.share_of_us(waits_us)
        if share <= MIN_BUBBLE_SHARE:
            return []
        a_step = milliseconds(waits_us / stage.busiest.step_count)
        return [
            self.finding(
                stage.busiest,
                share=share,
                recoverable_us=RECOVERABLE * waits_us,
                confidence="high" if share > HIGH_BUBBLE_SHARE else "medium",
                evidence=(
                    f"stage {stage.number}, the busiest of {len(known)} of the pipeline, waits "
                    f"{percent(share)} of the step for other stages, {a_step} a step",
                    f"of a schedule without interleaving that is the bubble of about "
                    f"{(len(known) - 1) * (1 - share) / share:.1f} micro-batches a step",
                ),
                advice=(
                    "Cut the batch into more micro-batches (at least four times as many as there "
                    "are stages), or interleave the stages (ScheduleInterleaved1F1B, Megatron's "
                    "virtual pipeline stages); use fewer stages where memory allows it."
                ),
            )
        ]

    def usual_shares(
        self, baseline: Sequence[Measures], alignment: Alignment | None
    ) -> list[float]:
        if not (known := stages(baseline)):
            return []
        busiest = max(known, key=lambda stage: stage.busy_us).busiest
        return [busiest.share_of_us(waits_for_stages_us(busiest))]


# Of the step, what an even split would save (our own values).
MIN_IMBALANCE_SHARE = 0.05
HIGH_IMBALANCE_SHARE = 0.15


class StageImbalanceRule(DiagnosisRule):
    kind = "stage_imbalance"
    supersedes = ("straggler",)

    def find(self, capture: Sequence[Measures], alignment: Alignment | None) -> list[Finding]:
        known = stages(capture)
        share = _imbalance(known)
        if share <= MIN_IMBALANCE_SHARE:
            return []
        slowest = max(known, key=lambda stage: stage.busy_us)
        each = ", ".join(f"{stage.number}: {milliseconds(stage.busy_us)}" for stage in known)
        measures = slowest.busiest
        return [
            self.finding(
                measures,
                share=share,
                recoverable_us=share * measures.window_us,
                confidence="high" if share > HIGH_IMBALANCE_SHARE else "medium",
                evidence=(
                    f"stage {slowest.number} of the pipeline computes "
                    f"{milliseconds(slowest.busy_us)} a step, the stages on average "
                    f"{milliseconds(fmean(stage.busy_us for stage in known))}: "
                    f"{percent(share)} of the step",
                    f"compute a step by stage: {each}",
                ),
                advice=(
                    f"Move layers from stage {slowest.number} to the stages that compute least; "
                    "count the embedding and the head with its loss as layers too."
                ),
            )
        ]

    def usual_shares(
        self, baseline: Sequence[Measures], alignment: Alignment | None
    ) -> list[float]:
        return [_imbalance(known)] if (known := stages(baseline)) else []


def _imbalance(known: Sequence[Stage]) -> float:
    """Of the step, by which the slowest stage is above the mean: an even split has the mean."""
    if not known:
        return 0.0
    slowest = max(known, key=lambda stage: stage.busy_us)
    longer_us = slowest.busy_us - fmean(stage.busy_us for stage in known)
    return slowest.busiest.share_of_us(longer_us * slowest.busiest.step_count)
