"""Finds faults of a pipeline: its bubble, and a stage that computes longer than the others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from warpwatch_diagnosis.alignment import Alignment
from warpwatch_diagnosis.intervals import difference, total, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import Capture, DiagnosisRule, Finding, advice
from warpwatch_diagnosis.trace.events import grouped
from warpwatch_diagnosis.words import milliseconds, percent

# The calls that hand activations and gradients from stage to stage, of torch.distributed and NCCL.
_BETWEEN_STAGES = re.compile(r"send|recv", re.IGNORECASE)
# The share of the step. A 1F1B schedule of p stages and m micro-batches waits (p - 1) / (m + p - 1)
# of it (Narayanan et al., 2104.04473): 10 % is nine micro-batches for each further stage.
MIN_BUBBLE_SHARE = 0.10
HIGH_BUBBLE_SHARE = 0.20
# Twice the micro-batches have about half of the bubble.
RECOVERABLE = 0.5
# The share of the step that an even split would save (our own values).
MIN_IMBALANCE_SHARE = 0.05
HIGH_IMBALANCE_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: its busiest rank, and the median compute of its ranks in a step."""

    number: int
    busiest: Measures
    busy_us: float


def _stages(capture: Capture) -> list[Stage]:
    """Return the stages in order; empty unless each one has a rank in the capture."""
    members = grouped(capture, lambda m: m.stage[0] if m.stage else 0)
    sizes = {m.stage[1] if m.stage else 1 for m in capture}
    if len(sizes) != 1 or len(members) < 2 or {*members} != {*range(*sizes)}:
        return []
    return [
        Stage(number, max(some, key=_busy_us), median(map(_busy_us, some)))
        for number, some in sorted(members.items())
    ]


def _busiest(stages: Sequence[Stage]) -> Stage:
    return max(stages, key=lambda stage: stage.busy_us)


def _busy_us(measures: Measures) -> float:
    """Return the compute in a step; on the CPU all time except waiting for data and ranks."""
    if measures.gpu is not None:
        return total(measures.gpu.compute) / measures.step_count
    waiting = union(measures.loading + (measures.cpu.waiting if measures.cpu else []))
    return (measures.window_us - total(waiting)) / measures.step_count


def _waits_us(measures: Measures) -> float:
    """Return the time in which the rank waits for other stages and does not compute."""
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


class PipelineBubbleRule(DiagnosisRule):
    """Finds the bubble: all stages, also the busiest, stand still while the pipeline fills."""

    kind = "pipeline_bubble"
    supersedes = ("communication_bound",)

    def find(self, capture: Capture, alignment: Alignment | None) -> list[Finding]:
        """Report the busiest stage: it waits for no slower one, so its waiting is the bubble."""
        if not (stages := _stages(capture)):
            return []
        stage = _busiest(stages)
        waits_us, count = _waits_us(stage.busiest), len(stages)
        share = stage.busiest.share_of_us(waits_us)
        if share <= MIN_BUBBLE_SHARE:
            return []
        a_step = milliseconds(waits_us / stage.busiest.step_count)
        evidence = (
            f"stage {stage.number}, the busiest of {count} of the pipeline, waits "
            f"{percent(share)} of the step for other stages, {a_step} a step",
            f"of a schedule without interleaving that is the bubble of about "
            f"{(count - 1) * (1 - share) / share:.1f} micro-batches a step",
        )
        sure = share > HIGH_BUBBLE_SHARE
        return [
            self.finding(
                stage.busiest, share, RECOVERABLE * waits_us, "high" if sure else "medium",
                evidence, advice(self.kind),
            )
        ]  # fmt: skip

    def usual_shares(self, baseline: Capture, alignment: Alignment | None) -> list[float]:
        if not (stages := _stages(baseline)):
            return []
        busiest = _busiest(stages).busiest
        return [busiest.share_of_us(_waits_us(busiest))]


class StageImbalanceRule(DiagnosisRule):
    """Finds a stage that computes longer than the others, which wait for it in every step."""

    kind = "stage_imbalance"
    supersedes = ("straggler",)

    def find(self, capture: Capture, alignment: Alignment | None) -> list[Finding]:
        stages = _stages(capture)
        share = _imbalance(stages)
        if share <= MIN_IMBALANCE_SHARE:
            return []
        slowest = _busiest(stages)
        each = ", ".join(f"{stage.number}: {milliseconds(stage.busy_us)}" for stage in stages)
        mean = milliseconds(fmean(stage.busy_us for stage in stages))
        evidence = (
            f"stage {slowest.number} of the pipeline computes {milliseconds(slowest.busy_us)} a "
            f"step, the stages on average {mean}: {percent(share)} of the step",
            f"compute a step by stage: {each}",
        )
        sure, saved_us = share > HIGH_IMBALANCE_SHARE, share * slowest.busiest.window_us
        return [
            self.finding(
                slowest.busiest, share, saved_us, "high" if sure else "medium", evidence,
                advice(self.kind, stage=slowest.number),
            )
        ]  # fmt: skip

    def usual_shares(self, baseline: Capture, alignment: Alignment | None) -> list[float]:
        return [_imbalance(stages)] if (stages := _stages(baseline)) else []


def _imbalance(stages: Sequence[Stage]) -> float:
    """Return the share of the step by which the slowest stage is above the mean."""
    if not stages:
        return 0.0
    slowest = _busiest(stages)
    longer_us = slowest.busy_us - fmean(stage.busy_us for stage in stages)
    return slowest.busiest.share_of_us(longer_us * slowest.busiest.step_count)
