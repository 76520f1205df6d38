"""Many small kernels: launching one takes longer than running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from warpwatch.diagnosis.gpu_time import SHORT_KERNEL_US, GpuTime
from warpwatch.diagnosis.intervals import total
from warpwatch.diagnosis.measures import Measures
from warpwatch.diagnosis.rules import host_bound
from warpwatch.diagnosis.rules.base import Finding, percent

# More than half of the kernels short (TraceLens's 10 µs), idle time as for host_bound.
MIN_SHORT_SHARE = 0.50


class LaunchBound:
    """The idle time is host_bound's; this one knows why the host is late."""

    kind = "launch_bound"
    supersedes: tuple[str, ...] = ("host_bound",)

    def share(self, measures: Measures) -> float | None:
        return measures.share(host_bound.lost(measures)) if measures.gpu else None

    def find(self, capture: Sequence[Measures]) -> list[Finding]:
        return [
            _finding(self.kind, m, m.gpu)
            for m in capture
            if m.gpu is not None and _short(m.gpu) and host_bound.applies(m)
        ]


def _short(gpu: GpuTime) -> bool:
    kernels = gpu.kernels
    return kernels.short_share > MIN_SHORT_SHARE and kernels.median_us < kernels.median_launch_us


def _finding(kind: str, measures: Measures, gpu: GpuTime) -> Finding:
    lost = host_bound.lost(measures)
    share = measures.share(lost)
    kernels = gpu.kernels
    found = Finding(
        kind=kind,
        rank=measures.rank,
        label=measures.label,
        share=share,
        recoverable_s=total(lost) / 1e6,
        confidence="high" if share > host_bound.HIGH_SHARE else "medium",
        evidence=(
            f"the GPU is idle for {percent(share)} of the step because its kernels are smaller "
            "than the price of launching them",
            f"{percent(kernels.short_share)} of {kernels.count:,} kernels are shorter than "
            f"{SHORT_KERNEL_US:.0f} µs; the median runs {kernels.median_us:.0f} µs and its launch "
            f"takes {kernels.median_launch_us:.0f} µs",
        ),
        advice=(
            'Use torch.compile(model, mode="reduce-overhead") or CUDA graphs, the optimizer with '
            "fused=True (or foreach=True), or a larger batch: fewer and larger kernels."
        ),
    )
    if measures.steps:
        per_step = f"there are {kernels.count // len(measures.steps):,} kernels a step"
        found = replace(found, evidence=(*found.evidence, per_step))
    return found
