"""A rank that computes longer than its peers, step after step, or ever longer.

In synchronous training all ranks' step times rise together; the culprit shows only in what a
rank does itself, so waiting (comm, data_wait) is taken off before ranks are compared. The level is
a median over steps, so that only a rank that is the slow one in most of them counts: sequence
lengths that make now one rank slow and now another do not, and pauses do not either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from warpwatch.daemon.config.detectors_ranks import StragglerConfig
from warpwatch.daemon.detectors import peers
from warpwatch.daemon.detectors.base import (
    NEVER,
    Fine,
    Found,
    JobStep,
    Observation,
    Reading,
    Timeless,
    Verdict,
)
from warpwatch.daemon.detectors.rank_levels import JobLevels, RankLevel
from warpwatch.daemon.detectors.sliding_median import median_of_ordered

# However far above the limit a level is, it is held for at least this part of ``hold_s``.
MAX_HASTE = 4.0
# Blocks in a row below half of the limit that end it.
RELEASE_BLOCKS = 2
# Weight of a new tick in the share of compute in the step.
SHARE_WEIGHT = 0.05
# A rank that changes by a quarter against its peers while it is learned: what it was is no news
# any more, and what it is now will be compared with them.
START_JUMP = math.log(1.25)
# A rank without a record for this many blocks left the job.
FORGET_BLOCKS = 5


@dataclass(slots=True)
class StragglerState:
    jobs: dict[str, JobLevels] = field(default_factory=dict)


class Straggler(Timeless):
    kind = "straggler"
    reads = (JobStep,)

    def __init__(self, config: StragglerConfig) -> None:
        self._config = config
        self._min_excess = math.log(config.min_ratio)
        self._drift_excess = math.log(config.drift_ratio)
        self._quartile_excess = math.log(config.quartile_ratio)
        self.state = StragglerState()

    def observe(self, seen: Observation) -> Iterable[Verdict]:
        assert isinstance(seen, JobStep)
        jobs = self.state.jobs
        job = jobs.get(seen.job)
        verdicts: Iterable[Verdict] = ()
        if job is None or seen.index <= job.index:
            # A job that began anew: other machines, other work.
            verdicts = (Fine(seen.time, seen.job),) if job is not None and job.on else ()
            job = jobs[seen.job] = JobLevels()
        job.index = seen.index
        if seen.index < self._config.warmup_steps or len(seen.compute_s) < 2:
            return verdicts
        step = peers.compare(seen, job.scaling, job.groups)
        tick_s = job.add(step, seen.duration_s, self._config)
        return self._judge(job, seen, tick_s) if tick_s > 0 else verdicts

    def forget(self, job: str) -> None:
        self.state.jobs.pop(job, None)

    def _judge(self, job: JobLevels, seen: JobStep, tick_s: float) -> Iterable[Verdict]:
        if seen.duration_s > 0:
            middle = sorted(seen.compute_s.values())[len(seen.compute_s) // 2]
            share = min(middle / seen.duration_s, 1.0)
            job.compute_share += SHARE_WEIGHT * (share - job.compute_share)
        found = self._judge_tick(job, seen, tick_s)
        block = job.block_ticks >= self._config.window_ticks
        if block:
            self._end_block(job, seen)
        elif not (job.on or found):
            return ()
        return self._verdicts(job, seen, repeat=block)

    def _judge_tick(self, job: JobLevels, seen: JobStep, tick_s: float) -> bool:
        """True if one of the ranks that were judged is found."""
        found, ticks, error = False, self._config.window_ticks, -1.0
        low, high = (ticks - 1) // 2, ticks // 2
        for rank in job.ranks.values():
            ordered = rank.window.ordered
            if rank.missed_blocks or len(ordered) < ticks:
                continue
            level = (ordered[low] + ordered[high]) / 2
            # What is calm without the windows' own noise is so with it.
            most = (level - rank.baseline.center) / rank.limit
            if most < 1 and most <= rank.nearest and not rank.on:
                rank.above_ticks, rank.above_s, rank.excess = 0, 0.0, 0.0
                continue
            error = job.error() if error < 0 else error
            limit = max(rank.limit, self._config.noise_factor * error)
            rank.excess = self._excess(job, rank, level, limit)
            self._judge_rank(job, rank, seen, tick_s)
            found = found or rank.on
        return found

    def _judge_rank(self, job: JobLevels, rank: RankLevel, seen: JobStep, tick_s: float) -> None:
        config = self._config
        if rank.excess > rank.nearest:
            rank.nearest, rank.nearest_step = rank.excess, seen.step
        if rank.excess < 1:
            rank.above_ticks, rank.above_s = 0, 0.0
            return
        if rank.above_ticks == 0 and not rank.on:
            # The median crosses the limit when half of the window is slow.
            half = config.window_ticks * job.steps_a_tick(config) // 2
            rank.begin_step = max(0, seen.step - half)
        rank.above_ticks += 1
        rank.above_s += tick_s * min(rank.excess, MAX_HASTE)
        if rank.above_ticks >= config.hold_ticks and rank.above_s >= config.hold_s:
            rank.on = True

    def _limit(self, job: JobLevels, rank: RankLevel, error: float, least: float) -> float:
        noise = max(rank.baseline.spread, job.noise, error)
        return max(least, self._config.noise_factor * noise)

    def _excess(self, job: JobLevels, rank: RankLevel, level: float, limit: float) -> float:
        """The rise over its limit, 1 at the limit."""
        rise = level - rank.baseline.center
        # A long time only beside peers who hardly compute costs the job nothing.
        cost = math.expm1(min(rise, 10.0)) * job.compute_share / self._config.min_cost
        return min(rise / limit, cost)

    def _end_block(self, job: JobLevels, seen: JobStep) -> None:
        job.block_ticks = 0
        calm = not any(rank.on for rank in job.ranks.values())
        error = job.error()
        job.drop_missing(FORGET_BLOCKS)
        for rank in job.ranks.values():
            if rank.window.full and rank.missed_blocks == 1:
                self._judge_block(job, rank, seen, calm, error)
        self._judge_quartiles(job, seen, calm, error)
        spreads = sorted(rank.baseline.spread for rank in job.ranks.values())
        job.noise = median_of_ordered(spreads)
        if not job.groups and all(map(self._is_ready, job.ranks.values())):
            job.form_groups(self._config)
        for rank in job.ranks.values():
            known = self._is_ready(rank)
            rank.limit = self._limit(job, rank, 0.0, self._min_excess) if known else NEVER

    def _is_ready(self, rank: RankLevel) -> bool:
        return len(rank.baseline.blocks) >= self._config.ready_blocks

    def _judge_block(
        self, job: JobLevels, rank: RankLevel, seen: JobStep, calm: bool, error: float
    ) -> None:
        config, level, size = self._config, rank.level, self._config.baseline_blocks
        rank.blocks = [*rank.blocks[1 - config.drift_blocks :], level]
        if not self._is_ready(rank):
            rank.baseline.begin_anew(level, START_JUMP)
            rank.baseline.learn(level, size)
            return
        limit = self._limit(job, rank, error, self._drift_excess)
        excess, long_excess = self._excess(job, rank, level, limit), 0.0
        if len(rank.blocks) >= config.drift_blocks:
            long_excess = self._excess(job, rank, rank.long_level, limit)
        if not rank.on and min(excess, long_excess) >= 1:
            rank.on = True
            rank.begin_step = max(0, seen.step - self._blocks_steps(job))
        elif rank.on:
            rank.now_and_then = rank.now_and_then and rank.excess < 1
            highest = max(excess, rank.excess, rank.upper.excess)
            rank.calm_blocks = rank.calm_blocks + 1 if highest < 0.5 else 0
            if rank.calm_blocks >= RELEASE_BLOCKS:
                rank.on = rank.from_start = rank.now_and_then = False
                rank.calm_blocks = 0
        elif calm and rank.baseline.center - level >= limit:
            rank.baseline.learn_lower(level, size)
        elif calm and excess < 1:
            rank.baseline.learn(level, size)

    def _judge_quartiles(self, job: JobLevels, seen: JobStep, calm: bool, error: float) -> None:
        """Who is slow in a quarter of the steps, while the others are not?"""
        config = self._config
        judged = [r for r in job.ranks.values() if r.window.full and r.missed_blocks == 1]
        if not job.groups or not judged:
            return
        for rank in judged:
            rank.upper.add(rank.window.upper_quartile(), config)
        # Lengths that got more uneven raise it everywhere.
        common = max(0.0, sorted(rank.upper.rise for rank in judged)[(len(judged) - 1) // 2])
        noise = median_of_ordered(sorted(rank.upper.baseline.spread for rank in judged))
        for rank in judged:
            upper, rise = rank.upper, rank.upper.rise - common
            if len(upper.baseline.blocks) < config.ready_blocks:
                upper.baseline.learn(upper.blocks[-1], config.baseline_blocks)
                continue
            limit = config.noise_factor * max(upper.baseline.spread, noise, error)
            cost = math.expm1(min(rise, 10.0)) / 4 * job.compute_share / config.min_cost
            upper.excess = min(rise / max(self._quartile_excess, limit), cost)
            if upper.excess >= 1 and not rank.on:
                rank.on = rank.now_and_then = True
                rank.begin_step = max(0, seen.step - self._blocks_steps(job))
            elif calm and upper.excess < 1:
                upper.baseline.learn(upper.blocks[-1], config.baseline_blocks)

    def _blocks_steps(self, job: JobLevels) -> int:
        config = self._config
        return config.drift_blocks * config.window_ticks * job.steps_a_tick(config)

    def _verdicts(self, job: JobLevels, seen: JobStep, repeat: bool) -> Iterable[Verdict]:
        slow = {number: rank for number, rank in job.ranks.items() if rank.on}
        was_on, job.on = job.on, bool(slow)
        if not slow:
            return (Fine(seen.time, seen.job),) if was_on else ()
        if was_on and not repeat:
            return ()
        # Others that are about to be found, and not just above the limit.
        least = max(max(rank.excess, 1.0) for rank in slow.values()) / 2
        slow.update((n, r) for n, r in job.ranks.items() if r.above_ticks and r.excess >= least)
        return (self._found(job, slow, seen),)

    def _found(self, job: JobLevels, slow: Mapping[int, RankLevel], seen: JobStep) -> Found:
        worst = max(slow, key=lambda number: slow[number].level - slow[number].baseline.center)
        rank = slow[worst]
        # What the rank's own way always was belongs to what it is compared with.
        usual_s = math.exp(job.references[worst] + rank.baseline.center)
        rise = rank.upper.rise if rank.now_and_then else rank.level - rank.baseline.center
        longer = math.expm1(rise)
        return Found(
            time=seen.time,
            severity="warning",
            job=seen.job,
            rank=worst if len(slow) == 1 else None,
            step=seen.step,
            begin_step=0 if rank.from_start else rank.begin_step,
            value=usual_s * (1 + longer),
            baseline=usual_s,
            summary=f"{who(slow, worst)} {100 * longer:.0f} % longer than "
            f"{whom(job, slow, worst)}{', in a quarter of its steps,' * rank.now_and_then} "
            f"{since(rank)}",
        )

    def readings(self) -> Iterable[Reading]:
        for name, job in self.state.jobs.items():
            if len(job.ranks) < 2:
                yield Reading("learning", "one rank has no peers to be compared with", name)
                continue
            for number, rank in job.ranks.items():
                yield self._reading(name, job, number, rank)

    def _reading(self, name: str, job: JobLevels, number: int, rank: RankLevel) -> Reading:
        known, ready = len(rank.baseline.blocks), self._config.ready_blocks
        if not self._is_ready(rank) or not rank.window.full:
            text = f"rank {number}: {known} of {ready} blocks of the baseline are known"
            return Reading("learning", text, name, number)
        usual = math.exp(rank.baseline.center)
        value = math.exp(rank.level)
        limit = usual * math.exp(self._limit(job, rank, job.error(), self._min_excess))
        return Reading(
            "found" if rank.on else "fine",
            f"rank {number} computes {value:.3f} times as long as its peers, usually "
            f"{usual:.3f}; found from {limit:.3f} on",
            job=name,
            rank=number,
            value=value,
            baseline=usual,
            limit=limit,
            nearest=rank.nearest,
            nearest_step=rank.nearest_step,
        )


def who(slow: Mapping[int, RankLevel], worst: int) -> str:
    if len(slow) == 1:
        return f"rank {worst} computes"
    return f"ranks {', '.join(map(str, sorted(slow)[:8]))} compute up to"


def whom(job: JobLevels, slow: Mapping[int, RankLevel], worst: int) -> str:
    group = job.groups.get(worst, peers.ALONE)
    alike = [n for n in job.ranks if group < 0 or job.groups.get(n) == group]
    count = len([number for number in alike if number not in slow])
    return "its peer" if count == 1 else f"its {count} peers" if count else "before"


def since(rank: RankLevel) -> str:
    return "from the start" if rank.from_start else f"since step {rank.begin_step}"
