"""A rank that computes longer than its peers, step after step, or ever longer.

In synchronous training all ranks' step times rise together; the culprit shows only in what a
rank does itself, so waiting (comm, data_wait) is taken off before ranks are compared. The level is
a median over steps, so that only a rank that is the slow one in most of them counts: sequence
lengths that make now one rank slow and now another do not, and pauses do not either.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from warpwatch_detection.config_ranks import StragglerConfig
from warpwatch_detection.detector import NEVER, DetectorStatus, Fine, JobDetector, JobStep, Verdict
from warpwatch_detection.signals import peers
from warpwatch_detection.signals.guarded_median import Middle
from warpwatch_detection.signals.rank_levels import JobLevels, RankLevel, error_of
from warpwatch_detection.signals.sliding_median import median_of_ordered
from warpwatch_telemetry.anomalies import Found

# However far above the limit a level is, it is held for at least this part of ``hold_s``.
MAX_HASTE = 4.0
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


class Straggler(JobDetector[JobLevels]):
    kind = "straggler"

    def __init__(self, config: StragglerConfig) -> None:
        self._config = config
        self._min_excess = math.log(config.min_ratio)
        self._drift_excess = math.log(config.drift_ratio)
        self._quartile_excess = math.log(config.quartile_ratio)
        self.state = StragglerState()

    def begin(self) -> JobLevels:
        return JobLevels()

    def judge(self, job: JobLevels, seen: JobStep) -> Iterable[Verdict]:
        if seen.index < self._config.warmup_steps or len(seen.compute_s) < 2:
            return ()
        step = peers.compare(seen, job.scaling, job.groups)
        tick_s = job.add(step, seen.duration_s, self._config)
        return self._judge_tick(job, seen, tick_s) if tick_s > 0 else ()

    def _judge_tick(self, job: JobLevels, seen: JobStep, tick_s: float) -> Iterable[Verdict]:
        if seen.duration_s > 0:
            middle = sorted(seen.compute_s.values())[len(seen.compute_s) // 2]
            share = middle / seen.duration_s
            job.compute_share += SHARE_WEIGHT * ((share if share < 1 else 1) - job.compute_share)
        found = job.near and self._judge_ranks(job, seen, tick_s)
        block = job.block_ticks >= self._config.window_ticks
        if block:
            self._end_block(job, seen)
        elif not (job.on or found):
            return ()
        return self._verdicts(job, seen, repeat=block)

    def _judge_ranks(self, job: JobLevels, seen: JobStep, tick_s: float) -> bool:
        """True if one of the ranks that were judged is found."""
        found, error = False, -1.0
        half = (self._config.window_ticks + 1) // 2
        # Most of them are far from anything that would change what is known of them.
        near = [rank for rank in job.ranks.values() if rank.window.above >= half]
        for rank in near:
            if rank.missed_blocks or not rank.window.full:
                continue
            level = rank.level
            # What is calm without the windows' own noise is so with it.
            most = (level - rank.baseline.center) / rank.limit
            if most < 1 and most <= rank.nearest and not rank.on:
                rank.calm_down()
                rank.watch()
                continue
            error = error_of(job.middles()) if error < 0 else error
            limit = max(rank.limit, self._config.noise_factor * error)
            rank.excess = self._excess(job, rank, level, limit)
            self._judge_rank(job, rank, seen, tick_s)
            rank.watch()
            found = found or rank.on
        job.near = any([rank.window.above >= half for rank in near])
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
        noise, spread = max(job.noise, error), rank.baseline.spread
        limit = self._config.noise_factor * (spread if spread > noise else noise)
        return limit if limit > least else least

    def _excess(self, job: JobLevels, rank: RankLevel, level: float, limit: float) -> float:
        """The rise over its limit, 1 at the limit."""
        rise = level - rank.baseline.center
        # A long time only beside peers who hardly compute costs the job nothing.
        cost = math.expm1(min(rise, 10.0)) * job.compute_share / self._config.min_cost
        return min(rise / limit, cost)

    def _end_block(self, job: JobLevels, seen: JobStep) -> None:
        job.block_ticks = 0
        calm = not any([rank.on for rank in job.ranks.values()])
        middles = job.middles()
        error = error_of(middles)
        job.drop_missing(FORGET_BLOCKS)
        judged = [
            (rank, middles[number])
            for number, rank in job.ranks.items()
            if number in middles and rank.missed_blocks == 1
        ]
        for rank, middle in judged:
            self._judge_block(job, rank, middle.median, seen, calm, error)
        if job.groups and judged:
            self._judge_quartiles(job, judged, seen, calm, error)
        job.noise = median_of_ordered(sorted([r.baseline.spread for r in job.ranks.values()]))
        if not job.groups and all(map(self._is_ready, job.ranks.values())):
            job.form_groups(self._config)
        for rank in job.ranks.values():
            known = self._is_ready(rank)
            rank.limit = self._limit(job, rank, 0.0, self._min_excess) if known else NEVER
            rank.watch()
        job.near = True

    def _is_ready(self, rank: RankLevel) -> bool:
        return len(rank.baseline.blocks) >= self._config.ready_blocks

    def _judge_block(
        self,
        job: JobLevels,
        rank: RankLevel,
        level: float,
        seen: JobStep,
        calm: bool,
        error: float,
    ) -> None:
        config, baseline = self._config, rank.baseline
        rank.blocks = [*rank.blocks[1 - config.drift_blocks :], level]
        if not self._is_ready(rank):
            baseline.begin_anew(level, START_JUMP)
            baseline.learn(level, config.baseline_blocks)
            return
        limit = self._limit(job, rank, error, self._drift_excess)
        if rank.on:
            rank.release(self._excess(job, rank, level, limit))
        elif level - baseline.center >= limit and self._excess(job, rank, level, limit) >= 1:
            known = len(rank.blocks) >= config.drift_blocks
            if known and self._excess(job, rank, rank.long_level, limit) >= 1:
                rank.on = True
                rank.begin_step = max(0, seen.step - self._blocks_steps(job))
        elif calm and baseline.center - level >= limit:
            baseline.learn_lower(level, config.baseline_blocks)
        elif calm:
            baseline.learn(level, config.baseline_blocks)

    def _judge_quartiles(
        self,
        job: JobLevels,
        judged: Sequence[tuple[RankLevel, Middle]],
        seen: JobStep,
        calm: bool,
        error: float,
    ) -> None:
        """Who is slow in a quarter of the steps, while the others are not?"""
        config = self._config
        for rank, middle in judged:
            rank.upper.add(middle.upper_quartile, config)
        # Lengths that got more uneven raise it everywhere.
        rises = sorted([rank.upper.rise for rank, _ in judged])
        common = max(0.0, rises[(len(rises) - 1) // 2])
        noise = median_of_ordered(sorted([rank.upper.baseline.spread for rank, _ in judged]))
        for rank, middle in judged:
            upper, rise = rank.upper, rank.upper.rise - common
            if len(upper.baseline.blocks) < config.ready_blocks:
                upper.baseline.learn(middle.upper_quartile, config.baseline_blocks)
                continue
            limit = config.noise_factor * max(upper.baseline.spread, noise, error)
            cost = math.expm1(min(rise, 10.0)) / 4 * job.compute_share / config.min_cost
            upper.excess = min(rise / max(self._quartile_excess, limit), cost)
            if upper.excess >= 1 and not rank.on:
                rank.on = rank.now_and_then = True
                rank.begin_step = max(0, seen.step - self._blocks_steps(job))
            elif calm and upper.excess < 1:
                upper.baseline.learn(middle.upper_quartile, config.baseline_blocks)

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

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            if len(job.ranks) < 2:
                yield DetectorStatus("learning", "one rank has no peers to be compared with", name)
                continue
            for number, rank in job.ranks.items():
                yield self._status(name, job, number, rank)

    def _status(self, name: str, job: JobLevels, number: int, rank: RankLevel) -> DetectorStatus:
        known, ready = len(rank.baseline.blocks), self._config.ready_blocks
        if not self._is_ready(rank) or not rank.window.full:
            text = f"rank {number}: {known} of {ready} blocks of the baseline are known"
            return DetectorStatus("learning", text, name, number)
        usual = math.exp(rank.baseline.center)
        value = math.exp(rank.level)
        limit = usual * math.exp(self._limit(job, rank, error_of(job.middles()), self._min_excess))
        return DetectorStatus(
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
