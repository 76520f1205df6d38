"""Python collects garbage in the step: every thread of the rank stands still meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis.measures.intervals import Intervals, total
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import Finding, idle, in_lines, milliseconds, percent, times

# Reference values of this project: more than this of the step, or, where other ranks wait for it,
# any pause this long. Unsynchronised collections are a known cause of slow jobs of many ranks
# (Understanding Stragglers in Large Model Training, OSDI 2025).
MIN_SHARE = 0.01
MIN_PAUSE_US = 50_000.0
HIGH_SHARE = 0.05


class GcPause:
    kind = "gc_pause"
    supersedes: tuple[str, ...] = ()

    def share(self, measures: Measures) -> float | None:
        return measures.share(_lost(measures))

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        return [self._finding(m) for m in capture if _applies(m, several=len(capture) > 1)]

    def _finding(self, measures: Measures) -> Finding:
        lost = _lost(measures)
        share = measures.share(lost)
        return Finding(
            kind=self.kind,
            rank=measures.rank,
            label=measures.label,
            share=share,
            recoverable_s=total(lost) / 1e6,
            confidence="high" if share > HIGH_SHARE else "medium",
            evidence=_evidence(measures, share),
            advice=_advice(measures),
        )


def _applies(measures: Measures, several: bool) -> bool:
    lost = _lost(measures)
    longest_us = max((end - begin for begin, end in lost), default=0.0)
    return measures.share(lost) > MIN_SHARE or (several and longest_us > MIN_PAUSE_US)


def _lost(measures: Measures) -> Intervals:
    """The pauses; where there is a GPU, its idle time under them."""
    return measures.host.gc.intervals if measures.gpu is None else idle(measures, "gc")


def _evidence(measures: Measures, share: float) -> tuple[str, ...]:
    pauses = measures.host.gc
    who = "the step" if measures.gpu is None else "the GPU's time"
    return (
        f"{percent(share)} of {who} passes while Python collects garbage",
        f"{', '.join(pauses.names[:2])}: {times(pauses.count)}, {milliseconds(pauses.total_us)} "
        f"together, {milliseconds(pauses.longest_us)} at most",
        *in_lines(measures, "gc"),
    )


def _advice(measures: Measures) -> str:
    called = any("collect" in name for name in measures.host.gc.names)
    first = "Take gc.collect() out of the step; c" if called else "C"
    return (
        f"{first}all gc.freeze() once everything is built, so that old objects are not looked at "
        "again, or gc.disable() and gc.collect() every 500 steps on all ranks at the same step; "
        "keep fewer Python objects (lists of dicts) alive, arrays and tensors are not looked at."
    )
