"""Many small kernels: launching one takes longer than running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from warpwatch_diagnosis.measures.gpu_time import SHORT_KERNEL_US, GpuTime
from warpwatch_diagnosis.measures.intervals import total
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules import host_bound
from warpwatch_diagnosis.rules.base import Finding, idle, milliseconds, percent, short

# More than half of the kernels short (TraceLens's 10 µs), idle time as for host_bound.
MIN_SHORT_SHARE = 0.50
# With more of the idle time than this outside operators, Python is to blame, not the launches.
MAX_HOST_SHARE = 0.50


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
            if m.gpu is not None and host_bound.applies(m) and _launches(m, m.gpu)
        ]


def _launches(measures: Measures, gpu: GpuTime) -> bool:
    outside_us = total(idle(measures, "host"))
    return gpu.kernels.short_share > MIN_SHORT_SHARE and outside_us < MAX_HOST_SHARE * total(
        host_bound.lost(measures)
    )


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
    return replace(found, evidence=(*found.evidence, *_counts(measures, gpu)))


def _counts(measures: Measures, gpu: GpuTime) -> list[str]:
    sentences = []
    if measures.steps:
        per_step = gpu.launches.count // len(measures.steps)
        spent = milliseconds(gpu.launches.total_call_us / len(measures.steps))
        sentences.append(f"{per_step:,} launches a step keep the host busy for {spent}")
    often = max(gpu.kernel_times, key=lambda k: k.count, default=None)
    if often is not None:
        sentences.append(
            f"most often launched: {short(often.name)}, {often.count:,} times, "
            f"{often.median_us:.1f} µs each"
        )
    return sentences
