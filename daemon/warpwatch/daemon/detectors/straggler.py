"""A rank that computes longer than its peers, block after block.

In synchronous training all ranks' step times rise together; the culprit shows only in what a
rank does itself, so waiting (comm, data_wait) is taken off before ranks are compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from warpwatch.daemon.config import StragglerConfig
from warpwatch.daemon.detectors.base import Found, JobStep
from warpwatch.daemon.detectors.level import BlockSpan, median
from warpwatch.daemon.detectors.rank_levels import JobLevels, RankLevel, RankLevelDetector


class Straggler(RankLevelDetector[StragglerConfig]):
    kind = "straggler"

    def values(self, seen: JobStep) -> Mapping[int, float]:
        return seen.compute_s

    def judge(self, job: JobLevels) -> None:
        if len(job.ranks) < 2:
            return
        levels = {number: median(rank.values) for number, rank in job.ranks.items()}
        ordered = sorted(levels.values())
        for number, rank in job.ranks.items():
            rank.level = levels[number]
            rank.reference = peers_median(ordered, levels[number])
            self._judge_rank(rank, job.span)

    def _judge_rank(self, rank: RankLevel, span: BlockSpan) -> None:
        config, baseline = self._config, rank.baseline
        if rank.reference <= 0:
            return
        ratio = rank.level / rank.reference
        # A long time only relative to peers who hardly compute costs the job nothing.
        step_s = span.elapsed_s / span.count
        cost = (rank.level - rank.reference) / step_s / config.min_cost if step_s > 0 else 0.0
        if baseline.ready:
            # Above the peers, and above what has always been this rank's way and noise.
            least = (config.min_ratio - 1) / 2 * baseline.center
            own = (ratio - baseline.center) / max(least, config.noise_factor * baseline.spread)
            excess = min((ratio - 1) / (config.min_ratio - 1), own, cost)
        else:
            excess = min((ratio - 1) / (config.start_ratio - 1), cost)
        rank.judge(excess, ratio, span, calm=excess < 1)

    def found(self, job: JobLevels, ranks: list[int], seen: JobStep) -> Found:
        worst = max(ranks, key=lambda number: job.ranks[number].level)
        rank = job.ranks[worst]
        longer = rank.level / rank.reference - 1 if rank.reference > 0 else 0.0
        peers = len(job.ranks) - len(ranks)
        who = f"rank {worst} computes"
        if len(ranks) > 1:
            who = f"ranks {', '.join(map(str, sorted(ranks)[:8]))} compute up to"
        whom = "its peer" if peers == 1 else f"its {peers} peers" if peers else "before"
        return Found(
            time=seen.time,
            severity="warning",
            job=seen.job,
            rank=worst if len(ranks) == 1 else None,
            step=seen.step,
            begin_step=rank.begin_step,
            value=rank.level,
            baseline=rank.reference,
            summary=f"{who} {100 * longer:.0f} % longer than {whom} since step {rank.begin_step}",
        )


def peers_median(ordered: list[float], own: float) -> float:
    """The (upper) median of ``ordered`` without one value equal to ``own``."""
    middle = (len(ordered) - 1) // 2
    return ordered[middle] if own > ordered[middle] else ordered[middle + 1]
