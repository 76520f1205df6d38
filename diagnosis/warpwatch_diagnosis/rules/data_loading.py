"""The step waits for its batch: iterating the DataLoader takes the time."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_diagnosis.measures.intervals import Intervals, difference, total
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import RankRule, idle, in_lines, milliseconds, percent, times

# Without a GPU the work of a loader without workers is work like any other up to TraceML's warning
# level; with workers the training process only waits.
MIN_CPU_SHARE = 0.10


class DataLoadingRule(RankRule):
    kind = "data_loading"
    # PyTorch's TensorBoard plugin warns above it; with a GPU only its idle time counts.
    min_share = 0.05
    # TraceML's critical level.
    high_share = 0.20

    def lost(self, measures: Measures) -> Intervals:
        """All of the loader's time, or where there is a GPU, its idle time under it."""
        if measures.gpu is None:
            return difference(measures.loading, measures.host.gc.intervals)
        return idle(measures, "data_loading")

    def share(self, measures: Measures, lost: Intervals) -> float:
        return measures.share(measures.loading)

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        works = measures.gpu is None and _single_process(measures)
        limit = MIN_CPU_SHARE if works else self.min_share
        return bool(measures.loader) and measures.share(lost) > limit

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        loader, loading = measures.loader, measures.loading
        longest = sorted((e.end_us - e.begin_us for e in loader), reverse=True)[:3]
        yield f"{percent(measures.share(loading))} of the step is spent fetching the next batch"
        yield (
            f"{loader[0].name} ran {times(len(loader))} for {milliseconds(total(loading))}; "
            f"the longest took {', '.join(milliseconds(us) for us in longest)}"
        )
        if measures.gpu:
            yield f"the GPU stood idle during {milliseconds(total(lost))} of it"
        if _single_process(measures):
            yield "the batches are made in the training process itself (num_workers=0)"
        yield from in_lines(measures, "loading")

    def advice(self, measures: Measures) -> str:
        if _single_process(measures):
            return (
                "Set DataLoader(num_workers=4, persistent_workers=True, pin_memory=True) so that "
                "batches are made beside the training; then look at what Dataset.__getitem__ waits "
                "for."
            )
        return (
            "Raise num_workers or prefetch_factor; if the workers are at their limit, make "
            "Dataset.__getitem__ cheaper: cache decoded samples or keep the data on a local disk."
        )


def _single_process(measures: Measures) -> bool:
    return any("SingleProcess" in e.name for e in measures.loader)
