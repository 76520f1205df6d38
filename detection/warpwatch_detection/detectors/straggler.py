"""Detects a rank that computes longer than its peers, in most steps, or more and more.

In synchronous training the step times of all ranks rise together. The culprit shows only in a
rank's own work, so waiting (comm, data_wait) is subtracted before ranks are compared. The level is
a median over steps, so that a rank counts only if it is slow in most of them. Pauses do not count,
nor sequence lengths that make another rank slow in each step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from statistics import median

from warpwatch_detection.detector import (
    DAY_S,
    NEVER,
    WARMUP_STEPS,
    DetectorStatus,
    JobIteration,
    JobStep,
    Results,
    StepsDetector,
    changed,
    deviations,
    job_status,
    rank_names,
)
from warpwatch_detection.signals import peers
from warpwatch_detection.signals.rank_levels import (
    BASELINE_BLOCKS,
    DRIFT_BLOCKS,
    EQUAL_WORK,
    MIN_RISE,
    READY_BLOCKS,
    WINDOW_TICKS,
    JobLevels,
    RankLevel,
    error_of,
    peer_limit,
)
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import Serve

# Ranks are compared from this step on. A longer warm-up of all ranks cancels, and a few more slow
# steps of one rank do not change the median of a window.
START_STEPS = 5
# A slow drift counts above the 5 % by which healthy GPUs differ.
DRIFT_RISE = math.log(1.06)
# 20 % longer in a quarter of the steps costs 5 % of the time.
QUARTILE_RISE = math.log(1.20)
# A detector that misses a rank that takes 20 % longer is blind.
EFFECT = 0.20
# The level must stay above the limit for these ticks and seconds, because the operating system can
# make busy cores slow for seconds.
HOLD_TICKS = 5
HOLD_S = 4.0
# A level at a multiple of the limit must last for HOLD_S over this multiple, which counts up to 4.
MAX_HASTE = 4.0
# The limits from the start: GPUs of one model differ by 8 % (Sinha et al., SC 2022), and rank 0
# logs.
START_RISE = math.log(1.08)
START_RISE_0 = math.log(1.15)
# The part by which a straggler must lengthen the step: a smaller gain is not worth an alarm.
MIN_COST = 0.03
# Weight of a new tick in the share of compute in the step.
SHARE_WEIGHT = 0.05
# If a rank's level changes by a quarter while its baseline is learned, the baseline starts again.
START_JUMP = math.log(1.25)
# A rank without a record for this many blocks left the job.
FORGET_BLOCKS = 5


class Straggler(StepsDetector[JobLevels]):
    kind = "straggler"
    state_version = 2
    state_of = JobLevels
    reads = (JobStep, JobIteration, Serve)

    def evaluate(self, job: JobLevels, seen: JobStep) -> Results:
        if seen.index < START_STEPS:
            return ()
        if len(seen.compute_s) < 2:
            return self.end_stale(seen)
        if not (job.stages or job.groups or len(set(seen.stages.values())) > 1):
            # If all ranks do the same work, they are compared with the same peers as before.
            job.stages = dict(seen.stages)
        if seen.stages != job.stages:
            job = self.state.jobs[seen.job_id] = JobLevels(
                index=seen.index, stages=dict(seen.stages), on=job.on
            )
        if seen.index == WARMUP_STEPS:
            job.begin_baseline()
        tick_s = job.add(peers.compare(seen, job.scaling, job.groups), seen.duration_s)
        if not job.ranks:
            # Each rank has its own stage, so none is compared.
            return self.end_stale(seen)
        job.unjudged.end()
        return self._end_tick(job, seen, tick_s) if tick_s > 0 else ()

    def _end_tick(self, job: JobLevels, seen: JobStep, tick_s: float) -> Results:
        if seen.duration_s > 0:
            middle = sorted(seen.compute_s.values())[len(seen.compute_s) // 2]
            share = min(middle / seen.duration_s, 1)
            job.compute_share += SHARE_WEIGHT * (share - job.compute_share)
        found = self._check_ranks(job, seen, tick_s)
        is_block = job.block_ticks >= WINDOW_TICKS
        if is_block:
            self._end_block(job, seen)
        elif not (job.on or found):
            return ()
        return self._results(job, seen, repeat=is_block)

    # --- every tick ---

    def _check_ranks(self, job: JobLevels, seen: JobStep, tick_s: float) -> bool:
        """Check each rank by its baseline, or by its peers before. Return whether one is found."""
        full = {number: rank for number, rank in job.full.items() if not rank.missed_blocks}
        equal: dict[int, float] = {}
        if not all(rank.is_ready for rank in full.values()):
            equal = {n: rank.level for n, rank in full.items() if abs(rank.work) <= EQUAL_WORK}
        peer_limit, error = self._peer_limit(job, seen, equal), -1.0
        for number, rank in full.items():
            level = rank.level
            if not rank.is_ready:
                least = START_RISE if number else START_RISE_0
                limit = max(peer_limit, least) if number in equal else NEVER
                rank.excess = self._excess(job, rank, level, limit)
                if rank.excess >= 1 and rank.lowest == NEVER:
                    # The rank has been slow since its first step.
                    rank.above_ticks, rank.above_s = 1, job.window_s * min(rank.excess, MAX_HASTE)
                    rank.begin_step = _since(job, seen, 1)
                rank.lowest = min(rank.lowest, level)
            elif rank.on or (level - rank.usual) / rank.limit > min(rank.nearest, 1):
                error = error_of(job.full.values()) if error < 0 else error
                limit = max(rank.limit, self._factor(job) * error)
                rank.excess = self._excess(job, rank, level, limit)
            else:
                # The limit need not be computed: the noise of the windows can only raise it.
                rank.above_ticks, rank.above_s = 0, 0.0
                continue
            self._hold(job, rank, seen, tick_s)
        return any(rank.on for rank in full.values())

    def _peer_limit(self, job: JobLevels, seen: JobStep, levels: Mapping[int, float]) -> float:
        """Return the limit of levels before baselines are ready.

        The rate assumes that a job starts once per day and that READY_BLOCKS windows pass before
        the baselines.
        """
        if seen.alike is False or not levels:
            return NEVER
        factor = deviations(self._rate_per_s, DAY_S / READY_BLOCKS, len(levels))
        groups, error = job.groups or job.stages, error_of(job.full.values())
        return peer_limit(levels, groups, factor, error, are_alike=bool(seen.alike))

    @staticmethod
    def _hold(job: JobLevels, rank: RankLevel, seen: JobStep, tick_s: float) -> None:
        """Find the rank once its excess has lasted for long enough."""
        rank.reach(rank.excess, seen.step)
        if rank.excess < 1:
            rank.above_ticks, rank.above_s = 0, 0.0
            return
        if rank.above_ticks == 0 and not rank.on:
            # The median crosses the limit when half of the window is slow.
            rank.begin_step = _since(job, seen, 1 / 2)
        rank.above_ticks += 1
        rank.above_s += tick_s * min(rank.excess, MAX_HASTE)
        if rank.above_ticks >= HOLD_TICKS and rank.above_s >= HOLD_S:
            rank.on = True

    def _factor(self, job: JobLevels) -> float:
        """Return the deviations that a rank's level has by chance; it is new every window."""
        return deviations(self._rate_per_s, job.window_s, len(job.ranks))

    def _limit(self, job: JobLevels, rank: RankLevel, error: float, least: float) -> float:
        past = min(max(rank.baseline.spread, job.noise), rank.most_noise)
        return max(least, self._factor(job) * max(past, error))

    @staticmethod
    def _excess(job: JobLevels, rank: RankLevel, level: float, limit: float) -> float:
        """Return the rise divided by its limit."""
        rise = level - rank.usual
        # If all ranks hardly compute, even a rank that takes much longer does not delay the job.
        cost = math.expm1(min(rise, 10.0)) * job.compute_share / MIN_COST
        return min(rise / limit, cost)

    # --- every block ---

    def _end_block(self, job: JobLevels, seen: JobStep) -> None:
        job.block_ticks = 0
        # A rank that has been slow from the start does not change the levels of the others.
        healthy = not any(rank.on and rank.is_ready for rank in job.ranks.values())
        error = error_of(job.full.values())
        job.drop_missing(FORGET_BLOCKS)
        current = [rank for rank in job.full.values() if rank.missed_blocks == 1]
        for rank in current:
            rank.end_block()
            rank.blocks = [*rank.blocks[1 - DRIFT_BLOCKS :], rank.level]
        job.bound_noise()
        for rank in current:
            if rank.is_ready:
                self._check_block(job, rank, seen, healthy, error)
            elif rank.on:
                rank.release(rank.excess)
            else:
                rank.baseline.begin_again(rank.level, START_JUMP)
                rank.baseline.learn(rank.level, BASELINE_BLOCKS)
        if job.groups and current:
            self._check_quartiles(job, current, seen, healthy, error)
        spreads = sorted(rank.baseline.spread for rank in job.ranks.values())
        job.noise = spreads[(len(spreads) - 1) // 2] if spreads else 0.0
        if not job.groups and all(rank.is_ready or rank.on for rank in job.ranks.values()):
            job.form_groups()
        for rank in job.ranks.values():
            rank.limit = self._limit(job, rank, 0.0, MIN_RISE) if rank.is_ready else NEVER

    def _check_block(
        self, job: JobLevels, rank: RankLevel, seen: JobStep, healthy: bool, error: float
    ) -> None:
        """Find a slow drift of a rank, end what is over, or learn the block."""
        baseline, level = rank.baseline, rank.level
        limit = self._limit(job, rank, error, DRIFT_RISE)
        if rank.on:
            rank.release(self._excess(job, rank, level, limit))
        elif level - baseline.center >= limit and self._excess(job, rank, level, limit) >= 1:
            long_level = median(rank.blocks)
            known = len(rank.blocks) >= DRIFT_BLOCKS
            if known and self._excess(job, rank, long_level, limit) >= 1:
                rank.on, rank.begin_step = True, _since(job, seen, DRIFT_BLOCKS)
        elif healthy and baseline.center - level >= limit:
            baseline.learn_lower(level, BASELINE_BLOCKS)
        elif healthy:
            baseline.learn(level, BASELINE_BLOCKS)

    def _check_quartiles(
        self, job: JobLevels, current: list[RankLevel], seen: JobStep, healthy: bool, error: float
    ) -> None:
        """Find ranks that are slow in a quarter of the steps, while their peers are not."""
        for rank in current:
            rank.upper.add(rank.window.upper_quartile())
        # Sequence lengths that became more uneven raise the quartile of all ranks.
        rises = sorted([rank.upper.rise for rank in current])
        common = max(0.0, rises[(len(rises) - 1) // 2])
        noise = median([rank.upper.baseline.spread for rank in current])
        for rank in current:
            upper, rise = rank.upper, rank.upper.rise - common
            if len(upper.baseline.blocks) < READY_BLOCKS:
                upper.baseline.learn(upper.blocks[-1], BASELINE_BLOCKS)
                continue
            limit = max(QUARTILE_RISE, self._factor(job) * max(upper.baseline.spread, noise, error))
            cost = math.expm1(min(rise, 10.0)) / 4 * job.compute_share / MIN_COST
            upper.excess = min(rise / limit, cost)
            if upper.excess >= 1 and not rank.on:
                rank.on = rank.now_and_then = True
                rank.begin_step = _since(job, seen, DRIFT_BLOCKS)
            elif healthy and upper.excess < 1:
                upper.baseline.learn(upper.blocks[-1], BASELINE_BLOCKS)

    # --- what is found ---

    def _results(self, job: JobLevels, seen: JobStep, repeat: bool) -> Results:
        slow = {number: rank for number, rank in job.ranks.items() if rank.on}
        was_on, job.on = job.on, bool(slow)
        if not slow or (was_on and not repeat):
            return () if slow else changed(seen.job_id, seen.time, was_on, None)
        # Name also the ranks that are about to be found, unless they are just above the limit.
        least = max(max(rank.excess, 1.0) for rank in slow.values()) / 2
        slow.update((n, r) for n, r in job.ranks.items() if r.above_ticks and r.excess >= least)
        return (self._found(job, slow, seen),)

    @staticmethod
    def _found(job: JobLevels, slow: Mapping[int, RankLevel], seen: JobStep) -> Detected:
        """Return the finding about the ranks ``slow``, one or more.

        The severity is info if the ranks' places in the job are unknown and the rank was slower
        from the start: it may have another stage of a pipeline.
        """
        worst = max(slow, key=lambda number: slow[number].level - slow[number].usual)
        rank = slow[worst]
        # The rank's usual difference from its peers belongs to the baseline.
        usual_s = math.exp(job.references[worst] + rank.usual)
        longer = math.expm1(rank.rise)
        who = f"{rank_names(slow)} {'computes' if len(slow) == 1 else 'compute up to'}"
        was_slower = not rank.is_ready and rank.rise < rank.lowest + MIN_RISE
        is_info = seen.alike is None and was_slower
        text = f"{who} {100 * longer:.0f} % longer than {_whom(job, slow, worst)}"
        text += ", in a quarter of its steps," if rank.now_and_then else ""
        text += f" since step {rank.begin_step}" if rank.begin_step else " from the start"
        text += "; it may have more work: its place in the job is unknown" if is_info else ""
        return seen.found(
            text,
            usual_s * (1 + longer),
            usual_s,
            severity="info" if is_info else "warning",
            rank=worst if len(slow) == 1 else None,
            begin_step=rank.begin_step,
        )

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            alone = [rank for rank, stage in job.stages.items() if stage == peers.ALONE]
            if alone:
                text = f"{rank_names(alone)} of a job in stages: no other rank does the same work"
                yield job_status(name, False, text, learns=True, blind=True)
            elif len(job.ranks) < 2:
                text = "one rank has no peers to be compared with"
                yield job_status(name, False, text, learns=True)
                continue
            for number, rank in job.ranks.items():
                yield self._status(name, job, number, rank)

    def _status(self, name: JobId, job: JobLevels, number: int, rank: RankLevel) -> DetectorStatus:
        if not rank.is_ready or not rank.window.full:
            known = min(len(rank.baseline.blocks), READY_BLOCKS)
            text = f"rank {number}: {known} of {READY_BLOCKS} blocks of the baseline are known, "
            text += f"beside its peers it came to {rank.excess:.2f} of the limit"
            return job_status(name, rank.on, text, learns=True, rank=number)
        usual, value = math.exp(rank.usual), math.exp(rank.level)
        rise = self._limit(job, rank, error_of(job.full.values()), MIN_RISE)
        limit = usual * math.exp(rise)
        text = f"rank {number} computes {value:.3f} times as long as its peers, usually "
        text += f"{usual:.3f}, limit {limit:.3f}"
        eyes = {"sees": math.expm1(min(rise, 10.0)), "effect": EFFECT, "rank": number}
        return job_status(name, rank.on, text, value, limit, rank, baseline=usual, **eyes)


def _since(job: JobLevels, seen: JobStep, windows: float) -> int:
    """Return the first step of the newest ``windows``; 0 if the job was warming up then."""
    begin = seen.step - int(windows * WINDOW_TICKS * job.steps_a_tick())
    return begin if begin > WARMUP_STEPS else 0


def _whom(job: JobLevels, slow: Mapping[int, RankLevel], worst: int) -> str:
    groups, its = job.groups or job.stages, "its" if len(slow) == 1 else "their"
    group = groups.get(worst, peers.ALONE)
    alike = [n for n in job.ranks if group < 0 or groups.get(n) == group]
    count = len([number for number in alike if number not in slow])
    return f"{its} peer" if count == 1 else f"{its} {count} peers" if count else "before"
