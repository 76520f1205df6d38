"""A rank that computes longer than its peers, block after block.

In synchronous training all ranks' step times rise together; the culprit shows only in what a
rank does itself, so waiting (comm, data_wait) is taken off before ranks are compared.
"""

from __future__ import annotations

from collections.abc import Iterable

from warpwatch.daemon.config import StragglerConfig
from warpwatch.daemon.detectors.base import Fine, Found, JobStep, Observation, Timeless, Verdict
from warpwatch.daemon.detectors.level import Baseline, BlockSpan, Persistence, median


class _Rank:
    def __init__(self, config: StragglerConfig) -> None:
        self.values: list[float] = []
        self.baseline = Baseline(config.baseline_blocks, config.ready_blocks)
        self.state = Persistence(config.hold_blocks, config.hold_s)
        self.from_start = Persistence(config.start_blocks)
        self.compute_s = 0.0
        self.peers_s = 0.0

    @property
    def slow(self) -> bool:
        return self.state.on or self.from_start.on


class _Job:
    def __init__(self, config: StragglerConfig) -> None:
        self.span = BlockSpan(config.block_steps, config.block_s)
        self.ranks: dict[int, _Rank] = {}
        self.on = False


class Straggler(Timeless):
    kind = "straggler"
    reads = (JobStep,)

    def __init__(self, config: StragglerConfig) -> None:
        self._config = config
        self._jobs: dict[str, _Job] = {}

    def observe(self, seen: Observation) -> Iterable[Verdict]:
        assert isinstance(seen, JobStep)
        if seen.index < self._config.warmup_steps:
            return ()
        job = self._jobs.get(seen.job)
        if job is None:
            job = self._jobs[seen.job] = _Job(self._config)
        if job.ranks.keys() != seen.compute_s.keys():
            self._change_ranks(job, seen)
        for rank, compute_s in seen.compute_s.items():
            job.ranks[rank].values.append(compute_s)
        if not job.span.add(seen.step, seen.duration_s):
            return ()
        verdict = self._judge(job, seen) if len(job.ranks) > 1 else ()
        for state in job.ranks.values():
            state.values.clear()
        job.span.restart()
        return verdict

    def forget(self, job: str) -> None:
        self._jobs.pop(job, None)

    def _change_ranks(self, job: _Job, seen: JobStep) -> None:
        """Ranks came or went: the block begins anew."""
        config = self._config
        job.ranks = {rank: job.ranks.get(rank) or _Rank(config) for rank in seen.compute_s}
        for rank in job.ranks.values():
            rank.values.clear()
        job.span.restart()

    def _judge(self, job: _Job, seen: JobStep) -> Iterable[Verdict]:
        levels = {number: median(rank.values) for number, rank in job.ranks.items()}
        ordered = sorted(levels.values())
        for number, rank in job.ranks.items():
            rank.compute_s = levels[number]
            rank.peers_s = peers_median(ordered, levels[number])
            self._judge_rank(rank, job.span)
        slow = [number for number, rank in job.ranks.items() if rank.slow]
        was_on, job.on = job.on, bool(slow)
        if slow:
            return (self._found(job, slow, seen),)
        return (Fine(seen.time, seen.job),) if was_on else ()

    def _judge_rank(self, rank: _Rank, span: BlockSpan) -> None:
        config, baseline = self._config, rank.baseline
        if rank.peers_s <= 0:
            return
        ratio = rank.compute_s / rank.peers_s
        # A long time only relative to peers who hardly compute costs the job nothing.
        step_s = span.elapsed_s / span.count
        cost = (rank.compute_s - rank.peers_s) / step_s / config.min_cost if step_s > 0 else 0.0
        if not baseline.ready:
            excess = min((ratio - 1) / (config.start_ratio - 1), cost)
            if not rank.from_start.update(excess, span) and excess < 1:
                baseline.add(ratio)
            return
        # Above the peers, and above what has always been this rank's way and noise.
        least = (config.min_ratio - 1) / 2 * baseline.center
        own = (ratio - baseline.center) / max(least, config.noise_factor * baseline.spread)
        excess = min((ratio - 1) / (config.min_ratio - 1), own, cost)
        if not rank.state.update(excess, span) and excess < 1:
            baseline.add(ratio)

    def _found(self, job: _Job, slow: list[int], seen: JobStep) -> Found:
        worst = max(slow, key=lambda number: job.ranks[number].compute_s)
        rank = job.ranks[worst]
        begin = (rank.from_start if rank.from_start.on else rank.state).begin_step
        longer = rank.compute_s / rank.peers_s - 1 if rank.peers_s > 0 else 0.0
        peers = len(job.ranks) - len(slow)
        who = f"rank {worst} computes"
        if len(slow) > 1:
            who = f"ranks {', '.join(map(str, sorted(slow)[:8]))} compute up to"
        whom = "its peer" if peers == 1 else f"its {peers} peers" if peers else "before"
        return Found(
            time=seen.time,
            severity="warning",
            job=seen.job,
            rank=worst if len(slow) == 1 else None,
            step=seen.step,
            begin_step=begin,
            value=rank.compute_s,
            baseline=rank.peers_s,
            summary=f"{who} {100 * longer:.0f} % longer than {whom} since step {begin}",
        )


def peers_median(ordered: list[float], own: float) -> float:
    """The (upper) median of ``ordered`` without one value equal to ``own``."""
    middle = (len(ordered) - 1) // 2
    return ordered[middle] if own > ordered[middle] else ordered[middle + 1]
