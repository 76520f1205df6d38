"""Many small kernels: launching one takes longer than running it."""

from __future__ import annotations

from collections.abc import Iterator

from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.intervals import Intervals, total
from warpwatch_diagnosis.measures.kernels import SHORT_KERNEL_US
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import idle, milliseconds, percent, short
from warpwatch_diagnosis.rules.host_bound import HostBoundRule

# More than half of the kernels short (TraceLens's 10 µs), idle time as for host_bound.
MIN_SHORT_SHARE = 0.50
# With more of the idle time than this outside operators, Python is to blame, not the launches.
MAX_HOST_SHARE = 0.50


class LaunchBoundRule(HostBoundRule):
    """The idle time is host_bound's; this one knows why the host is late."""

    kind = "launch_bound"
    supersedes = ("host_bound",)
    needs_gpu = True

    def applies(self, measures: Measures, lost: Intervals, several: bool) -> bool:
        gpu = measures.gpu
        return (
            gpu is not None
            and super().applies(measures, lost, several)
            and gpu.kernels.short_share > MIN_SHORT_SHARE
            and total(idle(measures, "host")) < MAX_HOST_SHARE * total(lost)
        )

    def evidence(self, measures: Measures, lost: Intervals) -> Iterator[str]:
        assert measures.gpu is not None
        kernels = measures.gpu.kernels
        yield (
            f"the GPU is idle for {percent(measures.share(lost))} of the step because its kernels "
            "are smaller than the price of launching them"
        )
        yield (
            f"{percent(kernels.short_share)} of {kernels.count:,} kernels are shorter than "
            f"{SHORT_KERNEL_US:.0f} µs; the median runs {kernels.median_us:.0f} µs and its launch "
            f"takes {kernels.median_launch_us:.0f} µs"
        )
        yield from _counts(measures, measures.gpu)

    def advice(self, measures: Measures) -> str:
        return (
            'Use torch.compile(model, mode="reduce-overhead") or CUDA graphs, the optimizer with '
            "fused=True (or foreach=True), or a larger batch: fewer and larger kernels."
        )


def _counts(measures: Measures, gpu: GpuTime) -> Iterator[str]:
    if measures.steps:
        per_step = gpu.launches.count // len(measures.steps)
        spent = milliseconds(gpu.launches.total_call_us / len(measures.steps))
        yield f"{per_step:,} launches a step keep the host busy for {spent}"
    often = max(gpu.kernel_times, key=lambda k: k.count, default=None)
    if often is not None:
        yield (
            f"most often launched: {short(often.name)}, {often.count:,} times, "
            f"{often.median_us:.1f} µs each"
        )
