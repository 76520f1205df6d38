"""torch.compile costs more than it brings: it compiles again, or graph breaks cut its code up."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_diagnosis.measures.intervals import Intervals, clip, total, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import RankRule, idle, in_lines, milliseconds, percent, times
from warpwatch_diagnosis.rules.host_bound import graph_breaks

# Of the step; compilations end with the first steps (own value, as for other rare work).
MIN_COMPILE_SHARE = 0.05


class RecompilationRule(RankRule):
    kind = "recompilation"
    # What is lost counts only where each of its parts is worth a finding.
    min_share = 0.0

    def lost(self, measures: Measures) -> Intervals:
        return union(_compiling(measures) + graph_breaks(measures))

    def is_sure(self, measures: Measures, lost: Intervals) -> bool:
        return bool(_compiling(measures)) and _compiles_again(measures)

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        yield from _compilations(measures, _compiling(measures))
        yield from _breaks(measures, graph_breaks(measures))

    def advice(self, measures: Measures) -> str:
        logs = "TORCH_LOGS=recompiles,graph_breaks names each reason"
        if not _compiling(measures):
            return (
                f"{logs}: take .item(), prints and checks of values out of the compiled code, "
                "torch.compile(fullgraph=True) shows the first one; or compile only the parts "
                "without."
            )
        if _compiles_again(measures):
            return (
                f"{logs}: call torch._dynamo.mark_dynamic(tensor, dim) or "
                "torch.compile(dynamic=True) for sizes that change, pad batches to a few lengths, "
                "use drop_last=True; raise torch._dynamo.config.recompile_limit only if the "
                "variants are few."
            )
        return (
            f"If these were the first steps, capture later ones. Else {logs}; a cache on disk "
            "(TORCHINDUCTOR_CACHE_DIR) makes the next start faster."
        )


def _compiling(measures: Measures) -> Intervals:
    """The compiling, with a GPU its idle time meanwhile, if it is worth a finding."""
    lost = idle(measures, "compile") if measures.gpu else measures.host.compile.intervals
    return lost if measures.share(lost) > MIN_COMPILE_SHARE else []


def _compiles_again(measures: Measures) -> bool:
    return _steps_that_compile(measures) > 1 or bool(measures.host.recompiled_regions)


def _steps_that_compile(measures: Measures) -> int:
    spent = measures.host.compile.intervals
    return sum(total(clip(spent, step)) > 0 for step in measures.steps)


def _compilations(measures: Measures, lost: Intervals) -> Iterator[str]:
    if not lost:
        return
    compiling, share = measures.host.compile, percent(measures.share(lost))
    who = (
        f"the GPU is idle for {share} of the step while"
        if measures.gpu
        else f"in {share} of the step"
    )
    yield f"{who} torch.compile compiles"
    yield (
        f"{', '.join(compiling.names[:2])}: {times(compiling.count)} in "
        f"{_steps_that_compile(measures)} of {len(measures.steps)} steps, "
        f"{milliseconds(compiling.total_us)} together, {milliseconds(compiling.longest_us)} at most"
    )
    if measures.host.recompiled_regions:
        yield (
            f"{measures.host.recompiled_regions:,} compiled regions in use (Torch-Compiled Region: "
            "frame/number above 0) were compiled because an earlier compilation did not fit"
        )
    yield from in_lines(measures, "compile")


def _breaks(measures: Measures, lost: Intervals) -> Iterator[str]:
    if not lost:
        return
    host = measures.host
    what = "the GPU's time is lost" if measures.gpu else "the step is lost"
    calls = host.compiled_regions / measures.step_count
    yield f"{percent(measures.share(lost))} of {what} between pieces of compiled code"
    yield (
        f"{'a step' if measures.steps else 'the trace'} calls {calls:,.0f} compiled regions of "
        f"{host.compiled_frames:,} functions; guards and Python in between take "
        f"{milliseconds(total(lost))} together"
    )
    yield from in_lines(measures, "host")
