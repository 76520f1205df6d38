"""Provides the reasons against a verdict: traces of different captures, and unexplained time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from warpwatch_diagnosis.comparison.alignment import Alignment, exposed_transfer_us
from warpwatch_diagnosis.measures.gpu_time import GpuTime
from warpwatch_diagnosis.measures.host_events import CAUSES
from warpwatch_diagnosis.measures.intervals import difference, union
from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.rules.base import Capture, percent
from warpwatch_diagnosis.rules.communication_bound import exposed
from warpwatch_diagnosis.trace.files import TraceError

# No job has more ranks; the limit bounds the list of missing ones.
MAX_WORLD_SIZE = 1_000_000
# Idle time (TraceLens) and waiting for other ranks that no rule explains are reasons not to say
# healthy. Losses of several kinds, each too small for a rule, have the same limit together.
MAX_IDLE_SHARE = 0.15
MAX_LOST_SHARE = 0.15
MAX_UNEVEN_WAIT_SHARE = 0.10
MAX_CPU_WAIT_SHARE = 0.25
# Without steps the window begins with the GPU's first work. The fetching of the first batch is not
# in it, and work queued meanwhile may hide the next ones' (data_loading's limit for a CPU's work).
MAX_LOADING_SHARE = 0.10
_SHOWN = 8


def check_one_capture(capture: Capture) -> None:
    """Raise TraceError if two traces are of the same rank, or not of the same job."""
    reason = _repeated(capture) or _unlike(capture)
    if reason is not None:
        raise TraceError(f"these are not ranks of one capture: {reason}")


def _repeated(capture: Capture) -> str | None:
    # Without a rank, two traces are of the same one only if they are the same file.
    keys = [m.rank if m.rank is not None else (m.file, m.window) for m in capture]
    repeated = [key for key, count in Counter(keys).items() if count > 1]
    if not repeated:
        return None
    same = [m for m, key in zip(capture, keys, strict=True) if key == repeated[0]]
    files = ", ".join(m.file for m in same[:_SHOWN])
    return f"{same[0].label} is there {len(same)} times ({files})"


def _unlike(capture: Capture) -> str | None:
    sizes = sorted({m.world_size for m in capture if m.world_size is not None})
    if len(sizes) > 1:
        return f"their world sizes differ ({', '.join(map(str, sizes[:_SHOWN]))})"
    jobs = sorted({m.job for m in capture if m.job is not None})
    if len(jobs) > 1:
        return f"their jobs differ ({', '.join(job[:60] for job in jobs[:_SHOWN])})"
    return None


def _missing_ranks(capture: Capture, missing: Mapping[int, str]) -> str | None:
    """Return the ranks without a usable trace as the subject of a sentence, or None."""
    # The traces name the size of the job, or a process group of at most that size.
    sizes = [m.world_size or 0 for m in capture]
    sizes += [c.group_size or 0 for m in capture if m.gpu for c in m.gpu.collectives]
    world = max(sizes, default=0)
    here = {m.rank for m in capture}
    if None in here:
        absent = max(world - len(capture), len(missing))
        return f"the traces of {absent} of {max(world, absent)} ranks" if absent > 0 else None
    ranks = [rank for rank in range(min(world, MAX_WORLD_SIZE)) if rank not in here]
    ranks += sorted(rank for rank in missing if rank >= world and rank not in here)
    if not ranks:
        return None
    reasons = {rank: f" ({why})" for rank, why in missing.items() if why}
    named = ", ".join(f"{rank}{reasons.get(rank, '')}" for rank in ranks[:_SHOWN])
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"the trace{'s' * (len(ranks) > 1)} of rank {named}{more}"


def waits_for_missing(enough: Capture, missing: Mapping[int, str]) -> list[str]:
    """Return a sentence if a rank waits long and others are missing: the reason may be theirs.

    A single trace is evaluated alone unless other ranks are known to be missing.
    """
    worst = max(enough, key=_wait_share, default=None)
    if worst is None or not _waits_long(worst) or (len(enough) == 1 and not missing):
        return []
    absent = _missing_ranks(enough, missing)
    if absent is None:
        return []
    return [
        f"without {absent} the reason cannot be determined: {worst.label} waits "
        f"{percent(_wait_share(worst))} of the step for collectives, perhaps for a rank whose "
        "trace is not here"
    ]


def doubts(capture: Capture, enough: Capture, alignment: Alignment | None) -> Iterator[str]:
    """Yield sentences, the most informative first; ``enough`` has the ranks with enough events."""
    yield from (f"{m.label}: {m.shortage}" for m in capture if m.shortage)
    for m in enough:
        found = _on_gpu(m, m.gpu) if m.gpu else _on_cpu(m, alone=len(enough) == 1)
        yield from (f"{m.label}: {doubt}" for doubt in found)
    yield from _uneven(enough)
    if alignment is not None:
        yield from _by_turns(enough, alignment)
    for m in enough:
        if m.gpu is not None:
            yield from (f"{m.label}: {doubt}" for doubt in _several_losses(m, m.gpu))


def _wait_share(measures: Measures) -> float:
    return measures.share(exposed(measures))


def _waits_long(measures: Measures) -> bool:
    return _wait_share(measures) > _wait_limit(measures)


def _wait_limit(measures: Measures) -> float:
    return MAX_UNEVEN_WAIT_SHARE if measures.gpu else MAX_CPU_WAIT_SHARE


def _on_gpu(measures: Measures, gpu: GpuTime) -> Iterator[str]:
    idle, loading = measures.share(gpu.idle), measures.share(measures.loading)
    if idle > MAX_IDLE_SHARE:
        cause = max(CAUSES, key=gpu.idle_time.total_us)
        reason = f"for several reasons, of which {cause.replace('_', ' ')} takes most"
        if cause in ("unexplained", "kernel_gap"):
            reason = "for no visible reason; record CUDA's synchronization events and stacks"
        yield f"the GPU is idle for {percent(idle)} of the step {reason}"
    if not measures.steps and loading > MAX_LOADING_SHARE:
        yield (
            f"fetching batches takes {percent(loading)} of the time, and whether the GPU waits for "
            "it is not sure without annotated steps; call profiler.step() in the loop"
        )


def _on_cpu(measures: Measures, alone: bool) -> Iterator[str]:
    if alone and _waits_long(measures):
        share = percent(_wait_share(measures))
        yield f"{share} of the step waits in collectives; the other ranks' traces say why"


def _uneven(measures: Capture) -> Iterator[str]:
    if len(measures) < 2:
        return
    least, *_, most = sorted(measures, key=_wait_share)
    gap = _wait_share(most) - _wait_share(least)
    # On the CPU the straggler's rule has already evaluated each step.
    if gap > _wait_limit(least):
        yield (
            f"{most.label} waits {percent(gap)} of the step more for collectives than {least.label}"
        )


def _by_turns(measures: Sequence[Measures], alignment: Alignment) -> Iterator[str]:
    """Yield a sentence if ranks wait long for each other and none is always the last."""
    waits = [
        (_wait_share(m) * m.window_us - exposed_transfer_us(m, rank, alignment)) / m.window_us
        for rank, m in enumerate(measures)
    ]
    if median(waits) > MAX_UNEVEN_WAIT_SHARE:
        yield (
            f"ranks wait {percent(median(waits))} of the step for each other by turns: the work of "
            "a step is uneven, as with sequences of different length"
        )


def _several_losses(measures: Measures, gpu: GpuTime) -> Iterator[str]:
    """Yield a sentence if idle time, exposed communication and copies are much together.

    The time that the device takes between two kernels does not count.
    """
    waits = exposed(measures)
    idle = difference(gpu.idle, gpu.idle_time.of("kernel_gap"))
    share = measures.share(union(idle + waits + gpu.exposed_transfers))
    if share <= MAX_LOST_SHARE:
        return
    parts = (
        ("idle time", difference(gpu.idle, waits)),
        ("exposed communication", waits),
        ("exposed copies", gpu.exposed_transfers),
    )
    named = ", ".join(f"{name} {percent(measures.share(us))}" for name, us in parts if us)
    yield (
        f"{percent(share)} of the step is lost for several reasons of which none stands out: "
        f"{named}"
    )
