"""The device waits because the host is busy with Python between the operators."""

from __future__ import annotations

from collections.abc import Sequence

from warpwatch_diagnosis.measures.cpu_time import CpuTime
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.intervals import Intervals, difference, intersection, total, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import (
    Finding,
    idle,
    in_lines,
    milliseconds,
    once,
    percent,
    worst_gaps,
)

# TraceLens flags idle time above this; the same is taken for a CPU's time outside operators.
MIN_SHARE = 0.15
HIGH_SHARE = 0.30
# What has a cause of its own needs less to be told: as idle time after synchronizing calls.
MIN_READING_SHARE = 0.05
MIN_BREAKS_SHARE = 0.05
MIN_SAVING_SHARE = 0.05
# A model that is compiled whole is a few regions, forward and optimizer (own value).
MIN_REGIONS_A_STEP = 10


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
    """Beside a cause that has a name, a slow host is a second fault only if it is a clear one."""
    limit = HIGH_SHARE if _explained(measures) else MIN_SHARE
    return measures.share(lost(measures)) > limit


@once
def lost(measures: Measures) -> Intervals:
    """The host's time that costs, without what other rules explain."""
    return difference(_own_time(measures), _explained(measures))


@once
def _explained(measures: Measures) -> Intervals:
    return union(reading(measures) + saving(measures) + graph_breaks(measures))


@once
def _own_time(measures: Measures) -> Intervals:
    """With a GPU its idle time in which the host launched, ran operators, or did what has no name;
    without one the training thread's time outside operators, loading and collectives,
    and its short operators."""
    if measures.gpu is not None:
        return idle(measures, "host", "dispatch", "launch")
    if measures.cpu is not None:
        return union(measures.cpu.host + measures.cpu.dispatch)
    return []


def reading(measures: Measures) -> Intervals:
    """Without a GPU: the loops that read one value after the other, if they are worth a finding.

    In compiled code it is a graph break.
    """
    if measures.cpu is None:
        return []
    loops = difference(measures.cpu.reading, measures.host.compiled_spans)
    return loops if measures.share(loops) > MIN_READING_SHARE else []


def saving(measures: Measures) -> Intervals:
    """Without a GPU: time that no event names but that looks like the writing of a checkpoint, if
    it is worth a finding."""
    gaps = measures.cpu.saving if measures.cpu else []
    return gaps if measures.share(gaps) > MIN_SAVING_SHARE else []


def graph_breaks(measures: Measures) -> Intervals:
    """The host's time between pieces of compiled code, if these are many and it is worth a finding.

    Pieces of one function only are no graph breaks: each layer of a model is compiled by itself.
    """
    host = measures.host
    many = host.compiled_regions > MIN_REGIONS_A_STEP * max(1, len(measures.steps))
    if not many or host.compiled_frames < 2:
        return []
    between = intersection(_own_time(measures), host.compiled_spans)
    return between if measures.share(between) > MIN_BREAKS_SHARE else []


def _evidence(measures: Measures) -> tuple[str, ...]:
    share = percent(measures.share(lost(measures)))
    if measures.gpu is not None:
        first = f"the GPU is idle for {share} of the step because the host is late"
        return (first, *_gaps(measures, measures.gpu))
    if measures.cpu is not None:
        first = f"{share} of the step is the host's own work around the operators"
        return (first, *_own_work(measures.cpu), *in_lines(measures, "host"))
    return ()


def _gaps(measures: Measures, gpu: GpuTime) -> tuple[str, ...]:
    launch, dispatch, host = (
        milliseconds(total(idle(measures, cause))) for cause in ("launch", "dispatch", "host")
    )
    sentences = [
        f"{milliseconds(total(lost(measures)))} of idle time ended with a launch that came only "
        f"after the GPU had run dry; meanwhile the host launched for {launch}, ran operators for "
        f"{dispatch}, and was outside of them for {host}",
        f"the median kernel runs {gpu.kernels.median_us:.0f} µs and its launch takes "
        f"{gpu.kernels.median_launch_us:.0f} µs",
    ]
    longest = measures.operators.by_self_time[:2]
    if longest:
        named = ", ".join(
            f"{o.name}{f' at {o.place}' if o.place else ''} {milliseconds(o.self_us)}"
            for o in longest
        )
        sentences.append(f"operators that took the host longest: {named}")
    gaps = worst_gaps(measures, "host")
    return (*sentences, gaps) if gaps else tuple(sentences)


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
            "Move Python work (logging, metrics, loops over tensors) out of the loop, try "
            "torch.compile(model) or a larger batch; a second capture with with_stack=True names "
            "the lines."
        )
    return (
        "Move Python work (loops over parameters, logging, sleeps) out of the training loop and "
        "replace many small operators by few large ones. A second capture with with_stack=True "
        "names the lines, and shows whether it is Python's garbage collection."
    )
