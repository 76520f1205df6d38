"""One stage of a pipeline computes longer than the others, which wait for it in every step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from warpwatch_diagnosis.comparison.alignment import Alignment
from warpwatch_diagnosis.comparison.stages import Stage, stages
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import Finding, Rule, milliseconds, percent

# Of the step, what an even split would save (our own values).
MIN_SHARE = 0.05
HIGH_SHARE = 0.15


class StageImbalanceRule(Rule):
    kind = "stage_imbalance"
    supersedes = ("straggler",)

    def find(self, capture: Sequence[Measures], alignment: Alignment | None) -> list[Finding]:
        known = stages(capture)
        share = _share(known)
        if share <= MIN_SHARE:
            return []
        slowest = max(known, key=lambda stage: stage.busy_us)
        each = ", ".join(f"{stage.number}: {milliseconds(stage.busy_us)}" for stage in known)
        measures = slowest.busiest
        return [
            self.finding(
                measures,
                share=share,
                recoverable_us=share * measures.window_us,
                confidence="high" if share > HIGH_SHARE else "medium",
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
        return [_share(known)] if (known := stages(baseline)) else []


def _share(known: Sequence[Stage]) -> float:
    """Of the step, by which the slowest stage is above the mean: an even split has the mean."""
    if not known:
        return 0.0
    slowest = max(known, key=lambda stage: stage.busy_us)
    longer_us = slowest.busy_us - fmean(stage.busy_us for stage in known)
    return slowest.busiest.share_of_us(longer_us * slowest.busiest.step_count)
