"""The log ratio of each rank to its peers, as the straggler detector remembers it.

Steps are gathered into ticks (a step, or as many short ones as fill ``tick_s``), ticks into a
sliding window whose median is the level, and every whole window is a block of the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from warpwatch_detection.config_ranks import StragglerConfig
from warpwatch_detection.detector import NEVER
from warpwatch_detection.signals.frozen_baseline import FrozenBaseline
from warpwatch_detection.signals.guarded_median import GuardedMedian, Middle
from warpwatch_detection.signals.peers import PeerRatios, group_by_level, lone_outlier
from warpwatch_detection.signals.sliding_median import median_of_ordered
from warpwatch_detection.signals.work_scaling import WorkScaling

# Times of ranks are not known better than this, as a log ratio.
MIN_SPREAD = 0.004
# Weight of a new step in the usual one.
STEP_WEIGHT = 0.05
# A tick ends at this many steps, however short they are.
MAX_TICK_STEPS = 50
# Groups must lie this many times the noise apart to be told from one another.
GROUP_NOISE_FACTOR = 4.0
# Blocks in a row below half of the limit that end it.
RELEASE_BLOCKS = 2
# What rounding may add to a level is less than the rest of its rise.
CALM_SHARE = 0.999


@dataclass(slots=True)
class QuartileLevel:
    """The upper quartile of a window: what a rank raises that is slow in some steps only.

    rise: of the median of the newest blocks over the baseline.
    """

    baseline: FrozenBaseline = field(default_factory=lambda: FrozenBaseline(MIN_SPREAD))
    blocks: list[float] = field(default_factory=list)
    rise: float = 0.0
    excess: float = 0.0

    def add(self, block: float, config: StragglerConfig) -> None:
        self.blocks = [*self.blocks[1 - config.drift_blocks :], block]
        self.rise = median_of_ordered(sorted(self.blocks)) - self.baseline.center


@dataclass(slots=True)
class RankLevel:
    """One rank. Levels are logs of ratios to its peers.

    above_ticks, above_s: how long the level has been above the limit without a break.
    calm_blocks: blocks in a row far below the limit, while found.
    now_and_then: it is slow in some steps, not in most.
    limit: of the level's rise until the block ends, by the noise of blocks; not yet: NEVER.
    excess: the rise over its limit; 0 where it is below and nobody asks.
    """

    window: GuardedMedian
    baseline: FrozenBaseline
    upper: QuartileLevel = field(default_factory=QuartileLevel)
    tick: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    missed_blocks: int = 0
    above_ticks: int = 0
    above_s: float = 0.0
    calm_blocks: int = 0
    limit: float = NEVER
    on: bool = False
    from_start: bool = False
    now_and_then: bool = False
    begin_step: int = 0
    excess: float = 0.0
    nearest: float = 0.0
    nearest_step: int | None = None

    @property
    def level(self) -> float:
        return self.window.median()

    def calm_down(self) -> None:
        self.above_ticks, self.above_s, self.excess = 0, 0.0, 0.0

    def watch(self) -> None:
        """Calm, it is not looked at before it may be nearer to the limit than it ever was."""
        guard = NEVER
        if self.on or self.excess:
            guard = -NEVER
        elif self.limit < NEVER:
            guard = self.baseline.center + CALM_SHARE * self.limit * min(self.nearest, 1.0)
        self.window.watch(guard)

    def release(self, excess: float) -> None:
        """At the end of a block: what was found is over if it has been gone for long enough."""
        self.now_and_then = self.now_and_then and self.excess < 1
        highest = max(excess, self.excess, self.upper.excess)
        self.calm_blocks = self.calm_blocks + 1 if highest < 0.5 else 0
        if self.calm_blocks >= RELEASE_BLOCKS:
            self.on = self.from_start = self.now_and_then = False
            self.calm_blocks = 0

    @property
    def long_level(self) -> float:
        """Of the last blocks together: what a slow drift has reached."""
        return median_of_ordered(sorted(self.blocks))


@dataclass(slots=True)
class JobLevels:
    """The ranks of one job; ``groups`` once the baseline is ready; ``step_s``: the usual step.

    noise: median of the ranks' spreads. One rank's own is known badly from few blocks, and ranks
    that do the same work on the same machines are about equally noisy. references: per rank the
    log of its peers' seconds, in the newest tick. near: a window may have passed its guard.
    """

    ranks: dict[int, RankLevel] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    references: dict[int, float] = field(default_factory=dict)
    scaling: WorkScaling = field(default_factory=WorkScaling)
    index: int = -1
    step_s: float = 0.0
    tick_steps: int = 0
    tick_s: float = 0.0
    block_ticks: int = 0
    compute_share: float = 1.0
    noise: float = 0.0
    near: bool = True
    on: bool = False

    def add(self, step: PeerRatios, duration_s: float, config: StragglerConfig) -> float:
        """One step. The seconds of the tick when it is full, else 0."""
        self._learn_step(duration_s)
        self.tick_steps += 1
        self.tick_s += duration_s
        steps = self.steps_a_tick(config)
        if self.tick_steps == steps == 1:
            self._take_step(step.ratios, config.window_ticks)
            return self._end_tick(step)
        for number, ratio in step.ratios.items():
            rank = self.ranks.get(number) or self._new_rank(number, config.window_ticks)
            rank.tick.append(ratio)
        if self.tick_steps < steps:
            return 0.0
        self._take_ticks()
        return self._end_tick(step)

    def _new_rank(self, number: int, size: int) -> RankLevel:
        rank = RankLevel(GuardedMedian.of_size(size), FrozenBaseline(MIN_SPREAD))
        self.ranks[number] = rank
        return rank

    def _take_step(self, ratios: Mapping[int, float], size: int) -> None:
        """A step that is a tick. Windows take it as their ``add`` does, without a call each."""
        ranks, near = self.ranks, (size + 1) // 2
        for number, ratio in ratios.items():
            try:
                rank = ranks[number]
            except KeyError:
                rank = self._new_rank(number, size)
            rank.missed_blocks = 0
            window = rank.window
            values, guard = window.values, window.guard
            values.append(ratio)
            oldest = values.pop(0)
            if ratio > guard:
                if oldest <= guard:
                    above = window.above = window.above + 1
                    if above >= near:
                        self.near = True
            elif oldest > guard:
                window.above -= 1

    def middles(self) -> dict[int, Middle]:
        """Of the ranks whose windows are full."""
        ranks = self.ranks.items()
        return {number: rank.window.middle() for number, rank in ranks if rank.window.full}

    def steps_a_tick(self, config: StragglerConfig) -> int:
        """As many as last ``tick_s``, by the usual step: a pause must not be a tick of its own."""
        if self.step_s >= config.tick_s:
            return 1
        most = config.tick_s / max(self.step_s, 1e-6)
        return min(max(1, math.ceil(most)), MAX_TICK_STEPS)

    def _learn_step(self, duration_s: float) -> None:
        if self.step_s == 0.0:
            self.step_s = duration_s
        usual_s = self.step_s
        most_s = 2.0 * usual_s
        self.step_s += STEP_WEIGHT * ((duration_s if duration_s < most_s else most_s) - usual_s)

    def _take_ticks(self) -> None:
        for rank in self.ranks.values():
            if rank.tick:
                rank.window.add(median_of_ordered(sorted(rank.tick)))
                rank.missed_blocks = 0
                rank.tick.clear()
        self.near = True

    def _end_tick(self, step: PeerRatios) -> float:
        """``step``: the last one of the tick."""
        tick_s, self.tick_s, self.tick_steps = self.tick_s, 0.0, 0
        explained = step.explained
        self.references |= (
            {number: value + explained[number] for number, value in step.references.items()}
            if explained
            else step.references
        )
        self.block_ticks += 1
        return tick_s

    def drop_missing(self, blocks: int) -> None:
        """At the end of a block: ranks that reported nothing for ``blocks`` are gone."""
        for number, rank in list(self.ranks.items()):
            rank.missed_blocks += 1
            if rank.missed_blocks > blocks:
                del self.ranks[number]
                self.groups.pop(number, None)
                self.references.pop(number, None)

    def form_groups(self, config: StragglerConfig) -> None:
        """The baseline is ready: who does the same work, and is one slow from the start?"""
        known = {n: r for n, r in self.ranks.items() if len(r.baseline.blocks)}
        levels = {number: rank.baseline.center for number, rank in known.items()}
        if not levels:
            return
        noise = GROUP_NOISE_FACTOR * self.noise
        slow = lone_outlier(levels, max(math.log(config.start_ratio), noise))
        gap = max(math.log(config.stage_ratio), noise)
        self.groups = group_by_level(levels, gap)
        for number, rank in known.items():
            like = [
                levels[other]
                for other in known
                if other != number and self.groups[other] == self.groups[number]
            ]
            if self.groups[number] >= 0:
                rank.baseline.shift(-median_of_ordered(sorted(like)))
                rank.window.clear()
                rank.on, rank.above_ticks, rank.above_s = False, 0, 0.0
            elif number == slow:
                rank.baseline.impose(0.0)
                rank.from_start = True


def error_of(middles: Mapping[int, Middle]) -> float:
    """Of the windows' medians by what they hold now: it knows at once of uneven steps."""
    errors = sorted([middle.error for middle in middles.values()])
    return median_of_ordered(errors) if errors else 0.0
