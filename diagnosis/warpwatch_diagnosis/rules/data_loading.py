"""The step waits for its batch: iterating the DataLoader takes the time."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis.measures.intervals import Intervals, difference, total
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import Finding, idle, in_lines, milliseconds, percent, times

# PyTorch's TensorBoard plugin warns above 5 % of the step; with a GPU only its idle time counts.
MIN_IDLE_SHARE = 0.05
# Without a GPU the work of a loader without workers is work like any other up to TraceML's warning
# level; with workers the training process only waits.
MIN_CPU_SHARE = 0.10
# TraceML's critical level.
HIGH_SHARE = 0.20


class DataLoading:
    kind = "data_loading"
    supersedes: tuple[str, ...] = ()

    def share(self, measures: Measures) -> float | None:
        return measures.share(measures.loading)

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        return [self._finding(m) for m in capture if self._applies(m)]

    def _applies(self, measures: Measures) -> bool:
        works = measures.gpu is None and _single_process(measures)
        limit = MIN_CPU_SHARE if works else MIN_IDLE_SHARE
        return bool(measures.loader) and measures.share(_lost(measures)) > limit

    def _finding(self, measures: Measures) -> Finding:
        lost = _lost(measures)
        share = measures.share(lost)
        return Finding(
            kind=self.kind,
            rank=measures.rank,
            label=measures.label,
            share=measures.share(measures.loading),
            recoverable_s=total(lost) / 1e6,
            confidence="high" if share > HIGH_SHARE else "medium",
            evidence=tuple(_evidence(measures, lost)),
            advice=_advice(measures),
        )


def _lost(measures: Measures) -> Intervals:
    """What the loader costs: all of its time, or where there is a GPU, its idle time under it."""
    if measures.gpu is None:
        return difference(measures.loading, measures.host.gc.intervals)
    return idle(measures, "data_loading")


def _evidence(measures: Measures, lost: Intervals) -> list[str]:
    loader = measures.loader
    longest = sorted((e.end_us - e.begin_us for e in loader), reverse=True)[:3]
    sentences = [
        f"{percent(measures.share(measures.loading))} of the step is spent fetching the next batch",
        f"{loader[0].name} ran {times(len(loader))} for {milliseconds(total(measures.loading))}; "
        f"the longest took {', '.join(milliseconds(us) for us in longest)}",
    ]
    if measures.gpu:
        sentences.append(f"the GPU stood idle during {milliseconds(total(lost))} of it")
    if _single_process(measures):
        sentences.append("the batches are made in the training process itself (num_workers=0)")
    return [*sentences, *in_lines(measures, "loading")]


def _single_process(measures: Measures) -> bool:
    return any("SingleProcess" in e.name for e in measures.loader)


def _advice(measures: Measures) -> str:
    if _single_process(measures):
        return (
            "Set DataLoader(num_workers=4, persistent_workers=True, pin_memory=True) so that "
            "batches are made beside the training; then look at what Dataset.__getitem__ waits for."
        )
    return (
        "Raise num_workers or prefetch_factor; if the workers are at their limit, make "
        "Dataset.__getitem__ cheaper: cache decoded samples or keep the data on a local disk."
    )
