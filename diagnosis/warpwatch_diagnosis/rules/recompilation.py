"""torch.compile costs more than it brings: it compiles again, or graph breaks cut its code up."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis.measures.intervals import Intervals, clip, total, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules import host_bound
from warpwatch_diagnosis.rules.base import Finding, idle, in_lines, milliseconds, percent, times

# Of the step; compilations end with the first steps (own value, as for other rare work).
MIN_COMPILE_SHARE = 0.05


class Recompilation:
    kind = "recompilation"
    supersedes: tuple[str, ...] = ()

    def share(self, measures: Measures) -> float | None:
        return measures.share(_lost(measures))

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        return [self._finding(m) for m in capture if _lost(m)]

    def _finding(self, measures: Measures) -> Finding:
        lost = _lost(measures)
        again = _steps_that_compile(measures) > 1 or bool(measures.host.recompiled_regions)
        return Finding(
            kind=self.kind,
            rank=measures.rank,
            label=measures.label,
            share=measures.share(lost),
            recoverable_s=total(lost) / 1e6,
            confidence="high" if _compiling(measures) and again else "medium",
            evidence=(*_compilations(measures), *_breaks(measures)),
            advice=_advice(measures, again),
        )


def _lost(measures: Measures) -> Intervals:
    return union(_compiling(measures) + host_bound.graph_breaks(measures))


def _compiling(measures: Measures) -> Intervals:
    """The compiling, with a GPU its idle time meanwhile, if it is worth a finding."""
    gpu = measures.gpu
    lost = idle(measures, "compile") if gpu else measures.host.compile.intervals
    return lost if measures.share(lost) > MIN_COMPILE_SHARE else []


def _steps_that_compile(measures: Measures) -> int:
    spent = measures.host.compile.intervals
    return sum(total(clip(spent, step)) > 0 for step in measures.steps)


def _compilations(measures: Measures) -> tuple[str, ...]:
    lost = _compiling(measures)
    if not lost:
        return ()
    compiling = measures.host.compile
    who = "the GPU is idle for {} of the step while" if measures.gpu else "in {} of the step"
    return (
        f"{who.format(percent(measures.share(lost)))} torch.compile compiles",
        f"{', '.join(compiling.names[:2])}: {times(compiling.count)} in "
        f"{_steps_that_compile(measures)} of {len(measures.steps)} steps, "
        f"{milliseconds(compiling.total_us)} together, "
        f"{milliseconds(compiling.longest_us)} at most",
        *_again(measures),
        *in_lines(measures, "compile"),
    )


def _again(measures: Measures) -> tuple[str, ...]:
    count = measures.host.recompiled_regions
    if not count:
        return ()
    return (
        f"{count:,} compiled regions in use (Torch-Compiled Region: frame/number above 0) were "
        "compiled because an earlier compilation did not fit",
    )


def _breaks(measures: Measures) -> tuple[str, ...]:
    lost = host_bound.graph_breaks(measures)
    if not lost:
        return ()
    host = measures.host
    what = "the GPU's time is lost" if measures.gpu else "the step is lost"
    calls = host.compiled_regions / (len(measures.steps) or 1)
    return (
        f"{percent(measures.share(lost))} of {what} between pieces of compiled code",
        f"{'a step' if measures.steps else 'the trace'} calls {calls:,.0f} compiled regions of "
        f"{host.compiled_frames:,} functions; guards and Python in between take "
        f"{milliseconds(total(lost))} together",
        *in_lines(measures, "host"),
    )


def _advice(measures: Measures, again: bool) -> str:
    logs = "TORCH_LOGS=recompiles,graph_breaks names each reason"
    if not _compiling(measures):
        return (
            f"{logs}: take .item(), prints and checks of values out of the compiled code, "
            "torch.compile(fullgraph=True) shows the first one; or compile only the parts without."
        )
    if again:
        return (
            f"{logs}: call torch._dynamo.mark_dynamic(tensor, dim) or torch.compile(dynamic=True) "
            "for sizes that change, pad batches to a few lengths, use drop_last=True; raise "
            "torch._dynamo.config.recompile_limit only if the variants are few."
        )
    return (
        f"If these were the first steps, capture later ones. Else {logs}; a cache on disk "
        "(TORCHINDUCTOR_CACHE_DIR) makes the next start faster."
    )
