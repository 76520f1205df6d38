"""Python collects garbage in the step: every thread of the rank stands still meanwhile."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_diagnosis.measures.intervals import Intervals, longest_us
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import RankRule, idle, in_lines, milliseconds, percent, times

# A pause this long counts where other ranks wait for it, however seldom. Unsynchronised collections
# are a known cause of slow jobs of many ranks (Understanding Stragglers in Large Model Training,
# OSDI 2025); the limits are reference values of this project.
MIN_PAUSE_US = 50_000.0


class GcPauseRule(RankRule):
    kind = "gc_pause"
    min_share = 0.01
    high_share = 0.05

    def lost(self, measures: Measures) -> Intervals:
        """The pauses; where there is a GPU, its idle time under them."""
        return measures.host.gc.intervals if measures.gpu is None else idle(measures, "gc")

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        held_up = several and longest_us(lost) > MIN_PAUSE_US
        return held_up or super().applies(measures, lost, several)

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        pauses = measures.host.gc
        who = "the step" if measures.gpu is None else "the GPU's time"
        yield f"{percent(measures.share(lost))} of {who} passes while Python collects garbage"
        yield (
            f"{', '.join(pauses.names[:2])}: {times(pauses.count)}, "
            f"{milliseconds(pauses.total_us)} together, {milliseconds(pauses.longest_us)} at most"
        )
        yield from in_lines(measures, "gc")

    def advice(self, measures: Measures) -> str:
        called = any("collect" in name for name in measures.host.gc.names)
        first = "Take gc.collect() out of the step; c" if called else "C"
        return (
            f"{first}all gc.freeze() once everything is built, so that old objects are not looked "
            "at again, or gc.disable() and gc.collect() every 500 steps on all ranks at the same "
            "step; keep fewer Python objects (lists of dicts) alive, arrays and tensors are not "
            "looked at."
        )
