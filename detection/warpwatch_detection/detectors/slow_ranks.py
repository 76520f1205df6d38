"""What a straggler's anomaly says: which ranks, how much slower than what, and since when."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from warpwatch_detection.detector import JobStep
from warpwatch_detection.signals import peers
from warpwatch_detection.signals.rank_levels import MIN_RISE, JobLevels, RankLevel
from warpwatch_telemetry.anomalies import Detected


def finding(job: JobLevels, slow: Mapping[int, RankLevel], seen: JobStep) -> Detected:
    """Return the finding about the ranks ``slow``, one or more.

    It is info if all that is known is that one rank takes longer than ranks whose place in the job
    nobody reports: it may have another stage of a pipeline to do.
    """
    worst = max(slow, key=lambda number: slow[number].level - slow[number].usual)
    rank = slow[worst]
    # What the rank's own way always was belongs to what it is compared with.
    usual_s = math.exp(job.references[worst] + rank.usual)
    longer = math.expm1(rank.rise)
    was_slower = not rank.is_ready and rank.rise < rank.lowest + MIN_RISE
    is_info = seen.alike is None and was_slower
    return seen.found(
        "info" if is_info else "warning",
        rank=worst if len(slow) == 1 else None,
        begin_step=rank.begin_step,
        value=usual_s * (1 + longer),
        baseline=usual_s,
        summary=f"{_who(slow, worst)} {100 * longer:.0f} % longer than "
        f"{_whom(job, slow, worst)}{', in a quarter of its steps,' * rank.now_and_then} "
        f"{f'since step {rank.begin_step}' if rank.begin_step else 'from the start'}"
        f"{'; it may have more work: its place in the job is unknown' * is_info}",
    )


def some(ranks: Iterable[int]) -> str:
    """Return the names of the first eight ranks."""
    return f"ranks {', '.join(map(str, sorted(ranks)[:8]))}"


def _who(slow: Mapping[int, RankLevel], worst: int) -> str:
    return f"rank {worst} computes" if len(slow) == 1 else f"{some(slow)} compute up to"


def _whom(job: JobLevels, slow: Mapping[int, RankLevel], worst: int) -> str:
    groups, its = job.groups or job.stages, "its" if len(slow) == 1 else "their"
    group = groups.get(worst, peers.ALONE)
    alike = [n for n in job.ranks if group < 0 or groups.get(n) == group]
    count = len([number for number in alike if number not in slow])
    return f"{its} peer" if count == 1 else f"{its} {count} peers" if count else "before"
