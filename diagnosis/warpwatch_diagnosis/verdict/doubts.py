"""What no rule explains and yet is not well: reasons to say neither a fault nor healthy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from warpwatch_diagnosis.comparison.alignment import Alignment, exposed_transfer_us
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.host_events import CAUSES
from warpwatch_diagnosis.measures.intervals import difference, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import percent
from warpwatch_diagnosis.rules.communication_bound import exposed
from warpwatch_diagnosis.trace.files import TraceError

_SHOWN = 8
# More than any job has; bounds what a hostile trace can ask for.
MAX_WORLD_SIZE = 1_000_000


def check_one_capture(capture: Sequence[Measures]) -> None:
    """Raises TraceError where two traces are of the same rank, or not of the same job."""
    reason = _repeated(capture) or _unlike(capture)
    if reason is not None:
        raise TraceError(f"these are not ranks of one capture: {reason}")


def _repeated(capture: Sequence[Measures]) -> str | None:
    # Without a rank, two traces are of the same one only if they are the same file.
    keys = [m.rank if m.rank is not None else (m.file, m.window) for m in capture]
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    if not repeated:
        return None
    same = [m for m, key in zip(capture, keys, strict=True) if key == repeated[0]]
    return (
        f"{same[0].label} is there {len(same)} times ({', '.join(m.file for m in same[:_SHOWN])})"
    )


def _unlike(capture: Sequence[Measures]) -> str | None:
    sizes = sorted({m.world_size for m in capture if m.world_size is not None})
    if len(sizes) > 1:
        return f"their world sizes differ ({', '.join(map(str, sizes[:_SHOWN]))})"
    jobs = sorted({m.job for m in capture if m.job is not None})
    if len(jobs) > 1:
        return f"their jobs differ ({', '.join(job[:60] for job in jobs[:_SHOWN])})"
    return None


def missing_ranks(capture: Sequence[Measures], missing: Mapping[int, str]) -> str | None:
    """The ranks of the job without a usable trace, as the subject of a sentence; None: none.

    ``missing``: the ranks that are known to have brought no trace, and why.
    """
    world = _world_size(capture)
    here = {m.rank for m in capture}
    if None in here:
        absent = max(world - len(capture), len(missing))
        return f"the traces of {absent} of {max(world, absent)} ranks" if absent > 0 else None
    absent_ranks = [rank for rank in range(min(world, MAX_WORLD_SIZE)) if rank not in here]
    absent_ranks += sorted(rank for rank in missing if rank >= world and rank not in here)
    if not absent_ranks:
        return None
    named = ", ".join(_named(rank, missing) for rank in absent_ranks[:_SHOWN])
    more = f" and {len(absent_ranks) - _SHOWN} more" if len(absent_ranks) > _SHOWN else ""
    return f"the trace{'s' * (len(absent_ranks) > 1)} of rank {named}{more}"


def _named(rank: int, missing: Mapping[int, str]) -> str:
    why = missing.get(rank)
    return f"{rank} ({why})" if why else str(rank)


def _world_size(capture: Sequence[Measures]) -> int:
    """As the traces say, at least the size of their largest process group; 0 if unknown."""
    sizes = [m.world_size or 0 for m in capture]
    groups = [c.group_size or 0 for m in capture if m.gpu for c in m.gpu.collectives]
    return max(sizes + groups, default=0)


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
