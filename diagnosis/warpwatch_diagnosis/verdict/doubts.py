"""What no rule explains and yet is not well: reasons to say neither a fault nor healthy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from warpwatch_diagnosis.comparison.alignment import Alignment, exposed_transfer_us
from warpwatch_diagnosis.comparison.completeness import missing_ranks
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.idle_causes import CAUSES
from warpwatch_diagnosis.measures.intervals import difference, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import percent
from warpwatch_diagnosis.rules.communication_bound import exposed

# Idle time (TraceLens) and waiting for other ranks that no rule explains are reasons not to say
# healthy. Losses of several kinds, each too small for a rule, may together be no more than that.
MAX_IDLE_SHARE = 0.15
MAX_LOST_SHARE = 0.15
MAX_UNEVEN_WAIT_SHARE = 0.10
MAX_CPU_WAIT_SHARE = 0.25
# Without steps the window begins with the GPU's first work, so the first batch's fetching is not in
# it, and work queued meanwhile may hide the next ones' (data_loading's limit for a CPU's work).
MAX_LOADING_SHARE = 0.10


def doubts(
    capture: Sequence[Measures], enough: Sequence[Measures], alignment: Alignment | None
) -> Iterator[str]:
    """A sentence each, those that say most first; ``enough``: ranks that can be judged."""
    yield from (f"{m.label}: {m.shortage}" for m in capture if m.shortage)
    for m in enough:
        found = _on_gpu(m, m.gpu) if m.gpu else _on_cpu(m, alone=len(enough) == 1)
        yield from (f"{m.label}: {doubt}" for doubt in found)
    yield from _uneven(enough)
    if alignment is not None:
        yield from _by_turns(enough, alignment)
    for m in enough:
        if m.gpu is not None and _lost_share(m, m.gpu) > MAX_LOST_SHARE:
            yield f"{m.label}: {_several_losses(m, m.gpu)}"


def waits_for_missing(enough: Sequence[Measures], missing: Mapping[int, str]) -> list[str]:
    """That a rank waits long for others of which some are not here: its reason may be theirs.

    One trace alone is judged, unless others are known to have been asked for.
    """
    worst = max(enough, key=_wait_share, default=None)
    if worst is None or not _waits_long(worst) or (len(enough) == 1 and not missing):
        return []
    absent = missing_ranks(enough, missing)
    if absent is None:
        return []
    return [
        f"without {absent} the reason cannot be determined: {worst.label} waits "
        f"{percent(_wait_share(worst))} of the step for collectives, perhaps for a rank whose "
        "trace is not here"
    ]


def _wait_share(measures: Measures) -> float:
    return measures.share(exposed(measures))


def _waits_long(measures: Measures) -> bool:
    return _wait_share(measures) > _wait_limit(measures)


def _wait_limit(measures: Measures) -> float:
    return MAX_UNEVEN_WAIT_SHARE if measures.gpu else MAX_CPU_WAIT_SHARE


def _on_gpu(measures: Measures, gpu: GpuTime) -> Iterator[str]:
    idle, loading = measures.share(gpu.idle), measures.share(measures.loading)
    if idle > MAX_IDLE_SHARE:
        yield f"the GPU is idle for {percent(idle)} of the step {_main_cause(gpu)}"
    if not measures.steps and loading > MAX_LOADING_SHARE:
        yield (
            f"fetching batches takes {percent(loading)} of the time, and whether the GPU waits for "
            "it is not sure without annotated steps; call profiler.step() in the loop"
        )


def _main_cause(gpu: GpuTime) -> str:
    """Of the idle time; it is too small for a finding of its own."""
    cause = max(CAUSES, key=gpu.idle_time.total_us)
    if cause in ("unexplained", "kernel_gap"):
        return "for no visible reason; record CUDA's synchronization events and stacks"
    return f"for several reasons, of which {cause.replace('_', ' ')} takes most"


def _on_cpu(measures: Measures, alone: bool) -> Iterator[str]:
    if alone and _waits_long(measures):
        share = percent(_wait_share(measures))
        yield f"{share} of the step waits in collectives; the other ranks' traces say why"


def _uneven(measures: Sequence[Measures]) -> Iterator[str]:
    if len(measures) < 2:
        return
    least, *_, most = sorted(measures, key=_wait_share)
    gap = _wait_share(most) - _wait_share(least)
    # On the CPU the straggler's rule has judged the steps one by one already.
    if gap > _wait_limit(least):
        yield (
            f"{most.label} waits {percent(gap)} of the step more for collectives than {least.label}"
        )


def _by_turns(measures: Sequence[Measures], alignment: Alignment) -> Iterator[str]:
    """Ranks that wait long for each other although none of them is always the last."""
    waits = [
        (_wait_share(m) * m.window_us - exposed_transfer_us(m, rank, alignment)) / m.window_us
        for rank, m in enumerate(measures)
    ]
    if median(waits) > MAX_UNEVEN_WAIT_SHARE:
        yield (
            f"ranks wait {percent(median(waits))} of the step for each other by turns: the work of "
            "a step is uneven, as with sequences of different length"
        )


def _lost_share(measures: Measures, gpu: GpuTime) -> float:
    """Idle time that is more than what the device takes between two kernels, and what of
    communication and copies no compute hides."""
    idle = difference(gpu.idle, gpu.idle_time.by_cause["kernel_gap"])
    return measures.share(union(idle + exposed(measures) + gpu.exposed_transfers))


def _several_losses(measures: Measures, gpu: GpuTime) -> str:
    parts = (
        ("idle time", difference(gpu.idle, exposed(measures))),
        ("exposed communication", exposed(measures)),
        ("exposed copies", gpu.exposed_transfers),
    )
    named = ", ".join(f"{name} {percent(measures.share(us))}" for name, us in parts if us)
    return (
        f"{percent(_lost_share(measures, gpu))} of the step is lost for several reasons of which "
        f"none stands out: {named}"
    )
