"""Steps that wait for input: the share of ``data_wait`` in the step, per rank."""

from __future__ import annotations

from collections.abc import Mapping

from warpwatch.daemon.config import DataStallConfig
from warpwatch.daemon.detectors.base import Found, JobStep
from warpwatch.daemon.detectors.level import BlockSpan
from warpwatch.daemon.detectors.rank_levels import JobLevels, RankLevel, RankLevelDetector

# The longest waits of a block that do not count: a lone slow batch is no stall.
LONE_SHARE = 0.1


class DataStall(RankLevelDetector[DataStallConfig]):
    kind = "data_stall"

    def values(self, seen: JobStep) -> Mapping[int, float]:
        return seen.data_wait_s

    def judge(self, job: JobLevels) -> None:
        for rank in job.ranks.values():
            rank.level = wait_share(rank.values, job.span.elapsed_s)
            self._judge_rank(rank, job.span)

    def _judge_rank(self, rank: RankLevel, span: BlockSpan) -> None:
        config, baseline = self._config, rank.baseline
        if not baseline.ready:
            excess = rank.level / config.start_share
            rank.judge(excess, rank.level, span, calm=excess < 1)
            return
        rank.reference = baseline.center
        rise = max(config.min_rise, config.noise_factor * baseline.spread)
        limit = max(rise, config.min_share - baseline.center)
        excess = (rank.level - baseline.center) / limit
        rank.judge(excess, rank.level, span, calm=abs(excess) < 1)

    def found(self, job: JobLevels, ranks: list[int], seen: JobStep) -> Found:
        worst = max(ranks, key=lambda number: job.ranks[number].level)
        rank = job.ranks[worst]
        baseline = None if rank.from_start else rank.reference
        who = f"rank {worst} waits" if len(ranks) == 1 else f"{len(ranks)} ranks wait"
        before = "from the start" if baseline is None else f"instead of {100 * baseline:.0f} %"
        return Found(
            time=seen.time,
            severity="warning",
            job=seen.job,
            rank=worst if len(ranks) == 1 and len(job.ranks) > 1 else None,
            step=seen.step,
            begin_step=rank.begin_step,
            value=rank.level,
            baseline=baseline,
            summary=f"{who} for data {100 * rank.level:.0f} % of the step {before}, "
            f"since step {rank.begin_step}",
        )


def wait_share(waits_s: list[float], elapsed_s: float) -> float:
    """The waits' share of the time, without the longest tenth of them."""
    lone = sorted(waits_s)[len(waits_s) - int(len(waits_s) * LONE_SHARE) :]
    lone_s = sum(lone)
    return (sum(waits_s) - lone_s) / (elapsed_s - lone_s) if elapsed_s > lone_s else 0.0
