"""A checkpoint is written in the step and the training waits for it."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_diagnosis.measures.intervals import Intervals, clip, longest_us, total, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import RankRule, idle, in_lines, milliseconds, percent, times
from warpwatch_diagnosis.rules.host_bound import saving


class CheckpointRule(RankRule):
    kind = "checkpoint"
    # Of the captured steps (own value, that of copies). Saving seldom costs the job less than that.
    min_share = 0.05

    def lost(self, measures: Measures) -> Intervals:
        """The writing; where there is a GPU, its idle time under it."""
        if measures.gpu is not None:
            return idle(measures, "checkpoint")
        return union(measures.host.checkpoint.intervals + saving(measures))

    def is_sure(self, measures: Measures, lost: Intervals) -> bool:
        return measures.host.checkpoint.count > 1

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        written, share = measures.host.checkpoint, percent(measures.share(lost))
        if measures.gpu is not None:
            yield f"the GPU is idle for {share} of the steps while a checkpoint is written"
        else:
            yield f"{share} of the steps is the writing of a checkpoint"
        seen = ", ".join(written.names[:2]) or (
            "gaps right after aten::detach of every parameter, as state_dict() makes before a save"
        )
        yield (
            f"{seen}: {times(written.count or len(saving(measures)))}, {milliseconds(total(lost))} "
            f"together, {milliseconds(longest_us(lost))} at most"
        )
        yield from _frequency(measures, lost)
        yield from in_lines(measures, "checkpoint")

    def advice(self, measures: Measures) -> str:
        return (
            "Save less often, or beside the training: torch.distributed.checkpoint.async_save "
            "copies the state and writes it in the background, every rank its own part. With "
            "torch.save: copy the state to the host first and write it in a thread, to a "
            "local disk."
        )


def _frequency(measures: Measures, lost: Intervals) -> Iterator[str]:
    """What the same costs if it is done less often."""
    steps = measures.steps
    saving_steps = sum(1 for step in steps if total(clip(lost, step)))
    if not saving_steps:
        return
    each_us = total(lost) / saving_steps
    step_us = (measures.window_us - total(lost)) / len(steps)
    if step_us <= 0:
        yield f"{saving_steps} of {len(steps)} captured steps save and do nothing else"
        return
    every = max(1, round(each_us / step_us / 0.01))
    yield (
        f"{saving_steps} of {len(steps)} captured steps save; saving every {every:,} steps would "
        "cost 1 % of the time"
    )
