"""All stages of a pipeline stand still while it fills and empties: also the busiest one."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis.comparison.alignment import Alignment
from warpwatch_diagnosis.comparison.stages import stages, waits_for_stages_us
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import Finding, Rule, milliseconds, percent

# Of the step. A 1F1B schedule of p stages and m micro-batches waits (p - 1) / (m + p - 1) of it
# (Narayanan et al., 2104.04473): 10 % is nine micro-batches for each further stage.
MIN_SHARE = 0.10
HIGH_SHARE = 0.20
# Twice the micro-batches have about half of the bubble.
RECOVERABLE = 0.5


class PipelineBubbleRule(Rule):
    kind = "pipeline_bubble"
    supersedes = ("communication_bound",)

    def find(self, capture: Sequence[Measures], alignment: Alignment | None) -> list[Finding]:
        """The busiest stage waits for no slower one, so that its waiting is the bubble."""
        if not (known := stages(capture)):
            return []
        stage = max(known, key=lambda stage: stage.busy_us)
        waits_us = waits_for_stages_us(stage.busiest)
        share = stage.busiest.share_of_us(waits_us)
        if share <= MIN_SHARE:
            return []
        a_step = milliseconds(waits_us / stage.busiest.step_count)
        return [
            self.finding(
                stage.busiest,
                share=share,
                recoverable_us=RECOVERABLE * waits_us,
                confidence="high" if share > HIGH_SHARE else "medium",
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
