"""The device waits because the host is busy with Python between the operators."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch.diagnosis.cpu_time import CpuTime
from warpwatch.diagnosis.gpu_time import GpuTime
from warpwatch.diagnosis.intervals import Intervals, difference, intersection, total, union
from warpwatch.diagnosis.measures import Measures
from warpwatch.diagnosis.rules.base import Finding, milliseconds, percent

# TraceLens flags idle time above this; the same is taken for a CPU's time outside operators.
MIN_SHARE = 0.15
# Of the idle time, what must have waited for a launch (reference value of this project).
MIN_HOST_WAIT_SHARE = 0.60
HIGH_SHARE = 0.30


class HostBound:
    kind = "host_bound"
    supersedes: tuple[str, ...] = ()

    def share(self, measures: Measures) -> float | None:
        return measures.share(lost(measures))

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        return [self._finding(m) for m in capture if applies(m)]

    def _finding(self, measures: Measures) -> Finding:
        share = measures.share(lost(measures))
        return Finding(
            kind=self.kind,
            rank=measures.rank,
            label=measures.label,
            share=share,
            recoverable_s=total(lost(measures)) / 1e6,
            confidence="high" if share > HIGH_SHARE else "medium",
            evidence=_evidence(measures),
            advice=_advice(measures),
        )


def applies(measures: Measures) -> bool:
    if measures.gpu is None:
        return measures.share(lost(measures)) > MIN_SHARE
    idle = difference(measures.gpu.idle, measures.loading)
    waited = total(lost(measures)) / total(idle) if idle else 0.0
    return measures.share(idle) > MIN_SHARE and waited > MIN_HOST_WAIT_SHARE


def lost(measures: Measures) -> Intervals:
    """With a GPU its idle time that waited for a launch, outside data loading; without one the
    training thread's time outside operators, loading and collectives, and its short operators."""
    if measures.gpu is not None:
        waiting = intersection(measures.gpu.idle, measures.gpu.host_wait)
        return difference(waiting, measures.loading)
    if measures.cpu is not None:
        return union(measures.cpu.host + measures.cpu.dispatch)
    return []


def _evidence(measures: Measures) -> tuple[str, ...]:
    share = percent(measures.share(lost(measures)))
    if measures.gpu is not None:
        first = f"the GPU is idle for {share} of the step because the host is late"
        return (first, *_gaps(measures, measures.gpu))
    if measures.cpu is not None:
        first = f"{share} of the step is the host's own work around the operators"
        return (first, *_own_work(measures.cpu))
    return ()


def _gaps(measures: Measures, gpu: GpuTime) -> tuple[str, ...]:
    gaps = sorted((end - begin for begin, end in lost(measures)), reverse=True)
    return (
        f"{len(gaps):,} gaps of {milliseconds(sum(gaps))} in total ended with a launch that came "
        f"only after the GPU had run dry; the longest took "
        f"{', '.join(milliseconds(us) for us in gaps[:3])}",
        f"the median kernel runs {gpu.kernels.median_us:.0f} µs and its launch takes "
        f"{gpu.kernels.median_launch_us:.0f} µs, so the launch calls alone do not explain it",
    )


def _own_work(cpu: CpuTime) -> tuple[str, ...]:
    gaps = sorted((end - begin for begin, end in cpu.host), reverse=True)
    return (
        f"{milliseconds(sum(gaps))} lie between operators, outside data loading and collectives; "
        f"the longest gaps took {', '.join(milliseconds(us) for us in gaps[:3])}",
        f"{cpu.dispatch_count:,} of {cpu.operators_count:,} operators are shorter than 10 µs and "
        f"take {milliseconds(total(cpu.dispatch))} together, mostly the price of calling them",
    )


def _advice(measures: Measures) -> str:
    if measures.gpu is not None:
        return (
            "Try torch.compile(model) or a larger batch, and move Python work (logging, metrics, "
            ".item()) out of the loop; a second capture with with_stack=True names the lines."
        )
    return (
        "Move Python work (loops over parameters, logging, sleeps) out of the training loop and "
        "replace many small operators by few large ones; with_stack=True names the lines."
    )
