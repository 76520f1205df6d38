"""Whether the traces are ranks of one capture, and which of its ranks have none.

What all ranks that are here wait for may be a rank that is not: its trace alone would say why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from warpwatch_diagnosis.measures.measures import Measures
from warpwatch_diagnosis.trace.errors import TraceError

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
