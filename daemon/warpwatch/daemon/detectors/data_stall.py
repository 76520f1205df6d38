"""Steps that wait for input: the share of ``data_wait`` in the step, per rank."""

from __future__ import annotations

from collections.abc import Iterable

from warpwatch.daemon.config import DataStallConfig
from warpwatch.daemon.detectors.base import Fine, Found, JobStep, Observation, Timeless, Verdict
from warpwatch.daemon.detectors.level import Baseline, BlockSpan, Persistence

# The longest waits of a block that do not count: a lone slow batch is no stall.
LONE_SHARE = 0.1


class _Rank:
    def __init__(self, config: DataStallConfig) -> None:
        self.waits: list[float] = []
        self.baseline = Baseline(config.baseline_blocks, config.ready_blocks)
        self.state = Persistence(config.hold_blocks, config.hold_s)
        self.from_start = Persistence(config.start_blocks)
        self.share = 0.0


class _Job:
    def __init__(self, config: DataStallConfig) -> None:
        self.span = BlockSpan(config.block_steps, config.block_s)
        self.ranks: dict[int, _Rank] = {}
        self.on = False


class DataStall(Timeless):
    kind = "data_stall"
    reads = (JobStep,)

    def __init__(self, config: DataStallConfig) -> None:
        self._config = config
        self._jobs: dict[str, _Job] = {}

    def observe(self, seen: Observation) -> Iterable[Verdict]:
        assert isinstance(seen, JobStep)
        if seen.index < self._config.warmup_steps:
            return ()
        job = self._jobs.get(seen.job)
        if job is None:
            job = self._jobs[seen.job] = _Job(self._config)
        if job.ranks.keys() != seen.data_wait_s.keys():
            self._change_ranks(job, seen)
        for rank, wait_s in seen.data_wait_s.items():
            job.ranks[rank].waits.append(wait_s)
        if not job.span.add(seen.step, seen.duration_s):
            return ()
        verdict = self._judge(job, seen)
        job.span.restart()
        return verdict

    def forget(self, job: str) -> None:
        self._jobs.pop(job, None)

    def _change_ranks(self, job: _Job, seen: JobStep) -> None:
        """Ranks came or went: the block begins anew."""
        config = self._config
        job.ranks = {rank: job.ranks.get(rank) or _Rank(config) for rank in seen.data_wait_s}
        for rank in job.ranks.values():
            rank.waits.clear()
        job.span.restart()

    def _judge(self, job: _Job, seen: JobStep) -> Iterable[Verdict]:
        for rank in job.ranks.values():
            self._judge_rank(rank, job.span)
        stalled = [r for r, rank in job.ranks.items() if rank.state.on or rank.from_start.on]
        was_on, job.on = job.on, bool(stalled)
        if stalled:
            return (self._found(job, stalled, seen),)
        return (Fine(seen.time, seen.job),) if was_on else ()

    def _judge_rank(self, rank: _Rank, span: BlockSpan) -> None:
        config, baseline = self._config, rank.baseline
        rank.share = wait_share(rank.waits, span.elapsed_s)
        rank.waits.clear()
        if not baseline.ready:
            excess = rank.share / config.start_share if config.start_share else 0.0
            if not rank.from_start.update(excess, span) and excess < 1:
                baseline.add(rank.share)
            return
        rise = max(config.min_rise, config.noise_factor * baseline.spread)
        limit = max(rise, config.min_share - baseline.center)
        excess = (rank.share - baseline.center) / limit if limit > 0 else 0.0
        if not rank.state.update(excess, span) and abs(excess) < 1:
            baseline.add(rank.share)

    def _found(self, job: _Job, stalled: list[int], seen: JobStep) -> Found:
        worst = max(stalled, key=lambda r: job.ranks[r].share)
        rank = job.ranks[worst]
        from_start = rank.from_start.on
        begin = (rank.from_start if from_start else rank.state).begin_step
        baseline = None if from_start else rank.baseline.center
        who = f"rank {worst} waits" if len(stalled) == 1 else f"{len(stalled)} ranks wait"
        before = "from the start" if baseline is None else f"instead of {100 * baseline:.0f} %"
        return Found(
            time=seen.time,
            severity="warning",
            job=seen.job,
            rank=worst if len(stalled) == 1 and len(job.ranks) > 1 else None,
            step=seen.step,
            begin_step=begin,
            value=rank.share,
            baseline=baseline,
            summary=f"{who} for data {100 * rank.share:.0f} % of the step {before}, "
            f"since step {begin}",
        )


def wait_share(waits_s: list[float], elapsed_s: float) -> float:
    """The waits' share of the time, without the longest tenth of them."""
    lone = sorted(waits_s)[len(waits_s) - int(len(waits_s) * LONE_SHARE) :]
    lone_s = sum(lone)
    return (sum(waits_s) - lone_s) / (elapsed_s - lone_s) if elapsed_s > lone_s else 0.0
