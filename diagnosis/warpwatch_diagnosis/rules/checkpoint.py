"""A checkpoint is written in the step and the training waits for it."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis.measures.intervals import Intervals, clip, total, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules import host_bound
from warpwatch_diagnosis.rules.base import Finding, idle, in_lines, milliseconds, percent, times

# Of the captured steps (own value, that of copies). Saving seldom costs the job less than that.
MIN_SHARE = 0.05


class Checkpoint:
    kind = "checkpoint"
    supersedes: tuple[str, ...] = ()

    def share(self, measures: Measures) -> float | None:
        return measures.share(_lost(measures))

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        return [self._finding(m) for m in capture if m.share(_lost(m)) > MIN_SHARE]

    def _finding(self, measures: Measures) -> Finding:
        lost = _lost(measures)
        named = measures.host.checkpoint.count > 0
        return Finding(
            kind=self.kind,
            rank=measures.rank,
            label=measures.label,
            share=measures.share(lost),
            recoverable_s=total(lost) / 1e6,
            confidence="high" if named and _saves(measures) > 1 else "medium",
            evidence=_evidence(measures),
            advice=(
                "Save less often, or beside the training: torch.distributed.checkpoint.async_save "
                "copies the state and writes it in the background, every rank its own part. With "
                "torch.save: copy the state to the host first and write it in a thread, to a "
                "local disk."
            ),
        )


def _lost(measures: Measures) -> Intervals:
    """The writing; where there is a GPU, its idle time under it."""
    if measures.gpu is not None:
        return idle(measures, "checkpoint")
    return union(measures.host.checkpoint.intervals + host_bound.saving(measures))


def _saves(measures: Measures) -> int:
    return measures.host.checkpoint.count or len(host_bound.saving(measures))


def _evidence(measures: Measures) -> tuple[str, ...]:
    lost, saves = _lost(measures), _saves(measures)
    longest_us = max((end - begin for begin, end in lost), default=0.0)
    share = percent(measures.share(lost))
    first = (
        f"the GPU is idle for {share} of the steps while a checkpoint is written"
        if measures.gpu
        else f"{share} of the steps is the writing of a checkpoint"
    )
    seen = _seen(measures)
    took = (
        f"{seen}: {times(saves)}, {milliseconds(total(lost))} together, "
        f"{milliseconds(longest_us)} at most"
    )
    return (first, took, *_frequency(measures, lost), *in_lines(measures, "checkpoint"))


def _seen(measures: Measures) -> str:
    names = measures.host.checkpoint.names
    if names:
        return ", ".join(names[:2])
    return "gaps right after aten::detach of every parameter, as state_dict() makes before a save"


def _frequency(measures: Measures, lost: Intervals) -> tuple[str, ...]:
    """What the same costs if it is done less often."""
    steps = measures.steps
    saving = [step for step in steps if total(clip(lost, step))]
    if not saving:
        return ()
    each_us = total(lost) / len(saving)
    step_us = (measures.window_us - total(lost)) / len(steps)
    if step_us <= 0:
        return (f"{len(saving)} of {len(steps)} captured steps save and do nothing else",)
    every = max(1, round(each_us / step_us / 0.01))
    return (
        f"{len(saving)} of {len(steps)} captured steps save; saving every {every:,} steps would "
        "cost 1 % of the time",
    )
