"""Keeps the log ratio of each rank to its peers, for the straggler detector.

Steps are grouped into ticks (a step, or as many short ones as fill TICK_S), ticks into a sliding
window whose median is the level. Every whole window is a block of the baseline.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median

from warpwatch_detection.detector import NEVER, Nearest, Unjudged
from warpwatch_detection.signals.baselines import (
    PEER_FACTOR,
    SIGMA_PER_MAD,
    FrozenBaseline,
    SlidingMedian,
    median_of_others,
)
from warpwatch_detection.signals.level_shift import student
from warpwatch_detection.signals.peers import ALONE, PeerRatios, WorkScaling, group_by_level

# The scheduler's slices of some milliseconds disturb short steps, so these share a tick.
TICK_S = 0.1
# A tick ends at this many steps, however short they are.
MAX_TICK_STEPS = 50
# The median of twenty ticks has a quarter of the scatter of one.
WINDOW_TICKS = 20
# The baseline has up to this many windows, and is used from READY_BLOCKS on.
BASELINE_BLOCKS = 20
READY_BLOCKS = 5
# A slow drift or a quartile is evaluated over five windows, which are a hundred ticks.
DRIFT_BLOCKS = 5
# Greyhound counts this as slow.
MIN_RISE = math.log(1.10)
# The least noise of a rank's log ratio.
MIN_SPREAD = 0.004
# Weight of a new step in the usual one.
STEP_WEIGHT = 0.05
# Groups must lie this many times the noise apart to count as different.
GROUP_NOISE_FACTOR = 4.0
# The ranks of another stage of a pipeline do a tenth more or less work.
STAGE_GAP = math.log(1.10)
# Work that explains more of a rank's time than this, in the mean over WORK_TICKS, is not equal.
# Before work has changed, the exponent is uncertain by a half, and no time follows it exactly.
EQUAL_WORK = 0.1
WORK_TICKS = 20
# A rank's steadiness is known from MIN_CHANGES changes of its own time from block to block on.
MIN_CHANGES, MAX_CHANGES = 5, 40
# After this many blocks in a row below half of the limit a rank is no longer slow.
RELEASE_BLOCKS = 2


@dataclass(slots=True)
class QuartileLevel:
    """The upper quartile of a window, which rises if a rank is slow in some steps only.

    rise: the median of the newest blocks minus the baseline.
    """

    baseline: FrozenBaseline = field(default_factory=lambda: FrozenBaseline(MIN_SPREAD))
    blocks: list[float] = field(default_factory=list)
    rise: float = 0.0
    excess: float = 0.0

    def add(self, block: float) -> None:
        self.blocks = [*self.blocks[1 - DRIFT_BLOCKS :], block]
        self.rise = median(self.blocks) - self.baseline.center


@dataclass(slots=True)
class RankLevel(Nearest):
    """One rank; levels are logs of ratios to its peers.

    tick: the ratios in the open tick. blocks: the newest levels, one per block.
    missed_blocks: the blocks since the rank last reported a step.
    above_ticks, above_s: how long the level has been above the limit without a break.
    low_blocks: while the rank is found, the blocks in a row far below the limit.
    limit: the least rise of the level that counts, until the block ends; NEVER: not known yet.
    lowest: the least level of a full window before the baseline is ready; NEVER before the first.
    work: the part of its log time that work explains, minus that of the median rank.
    now_and_then: whether it is slow in some steps only.
    excess: the rise over its limit, at the newest evaluation.
    own: the logs of its own compute time in the block's ticks. own_level: their median in the block
    before. own_changes: the changes of this median. most_noise: the bound of its noise, by its
    peers' noise.
    """

    window: SlidingMedian = field(default_factory=lambda: SlidingMedian(WINDOW_TICKS))
    baseline: FrozenBaseline = field(default_factory=lambda: FrozenBaseline(MIN_SPREAD))
    upper: QuartileLevel = field(default_factory=QuartileLevel)
    tick: list[float] = field(default_factory=list)
    blocks: list[float] = field(default_factory=list)
    missed_blocks: int = 0
    above_ticks: int = 0
    above_s: float = 0.0
    low_blocks: int = 0
    limit: float = NEVER
    on: bool = False
    lowest: float = NEVER
    work: float = 0.0
    now_and_then: bool = False
    begin_step: int = 0
    excess: float = 0.0
    most_noise: float = NEVER
    own: list[float] = field(default_factory=list)
    own_level: float | None = None
    own_changes: SlidingMedian = field(default_factory=lambda: SlidingMedian(MAX_CHANGES))

    @property
    def level(self) -> float:
        return self.window.median()

    @property
    def is_ready(self) -> bool:
        return len(self.baseline.blocks) >= READY_BLOCKS

    @property
    def usual(self) -> float:
        """The level that the rank's level is compared with; 0, its peers' level, at first."""
        return self.baseline.center if self.is_ready else 0.0

    @property
    def rise(self) -> float:
        """The rise of the level, or of the upper quartile if the rank is slow now and then."""
        return self.upper.rise if self.now_and_then else self.level - self.usual

    @property
    def steadiness(self) -> float:
        """The standard deviation of its own compute time; infinite while it is not known."""
        changes = self.own_changes
        if len(changes.recent) < MIN_CHANGES:
            return NEVER
        return max(SIGMA_PER_MAD * changes.median() / math.sqrt(2), MIN_SPREAD)

    def end_block(self) -> None:
        if not self.own:
            return
        before, self.own_level = self.own_level, median(self.own)
        if before is not None:
            self.own_changes.add(abs(self.own_level - before))
        self.own.clear()

    def release(self, excess: float) -> None:
        """Clear the rank after RELEASE_BLOCKS below half of the limit; call this once per block."""
        self.now_and_then = self.now_and_then and self.excess < 1
        highest = max(excess, self.excess, self.upper.excess)
        self.low_blocks = self.low_blocks + 1 if highest < 0.5 else 0
        if self.low_blocks >= RELEASE_BLOCKS:
            self.on = self.now_and_then = False
            self.low_blocks = 0


@dataclass(slots=True)
class JobLevels:
    """The ranks of one job.

    groups: by rank, once the baseline is ready. stages: the groups by the job's parallelism; empty
    if it is unknown. references: by rank, the log of its peers' seconds in the newest tick.
    step_s: the usual step. compute_share: the usual share of compute in a step.
    noise: the median of the ranks' spreads; one rank's spread is uncertain after few blocks, and
    ranks with the same work on the same machines are about equally noisy.
    """

    ranks: dict[int, RankLevel] = field(default_factory=dict)
    groups: dict[int, int] = field(default_factory=dict)
    stages: dict[int, int] = field(default_factory=dict)
    references: dict[int, float] = field(default_factory=dict)
    scaling: WorkScaling = field(default_factory=WorkScaling)
    index: int = -1
    step_s: float = 0.0
    tick_steps: int = 0
    tick_s: float = 0.0
    block_ticks: int = 0
    compute_share: float = 1.0
    noise: float = 0.0
    on: bool = False
    unjudged: Unjudged = field(default_factory=Unjudged)

    @property
    def full(self) -> dict[int, RankLevel]:
        """The ranks whose windows are full, by number."""
        return {number: rank for number, rank in self.ranks.items() if rank.window.full}

    def add(self, step: PeerRatios, duration_s: float) -> float:
        """Add a step. Return the seconds of the tick if this step completes it, else 0."""
        self._learn_step(duration_s)
        self.tick_steps += 1
        self.tick_s += duration_s
        steps = self.steps_a_tick()
        for number, ratio in step.ratios.items():
            rank = self.ranks.get(number) or self.ranks.setdefault(number, RankLevel())
            if steps == 1:
                rank.window.add(ratio)
                rank.missed_blocks = 0
            else:
                rank.tick.append(ratio)
        if self.tick_steps < steps:
            return 0.0
        for rank in self.ranks.values():
            if rank.tick:
                rank.window.add(median(rank.tick))
                rank.missed_blocks = 0
                rank.tick.clear()
        return self._end_tick(step)

    def begin_baseline(self) -> None:
        """Leave the steps so far out of the ranks' baselines."""
        self.step_s, self.tick_s, self.tick_steps, self.block_ticks = 0.0, 0.0, 0, 0
        for rank in self.ranks.values():
            rank.own.clear()
            rank.tick.clear()

    @property
    def window_s(self) -> float:
        return WINDOW_TICKS * self.steps_a_tick() * self.step_s

    def bound_noise(self) -> None:
        """Bound each rank's noise by that of its peers: more is a fault of its own."""
        steadiness = {number: rank.steadiness for number, rank in self.ranks.items()}
        ordered = sorted(steadiness.values())
        for number, rank in self.ranks.items():
            rank.most_noise = PEER_FACTOR * median_of_others(ordered, steadiness[number])

    def steps_a_tick(self) -> int:
        """Return the steps per TICK_S, by the usual step, so that no pause is a tick of its own."""
        if self.step_s >= TICK_S:
            return 1
        return min(math.ceil(TICK_S / max(self.step_s, 1e-6)), MAX_TICK_STEPS)

    def _learn_step(self, duration_s: float) -> None:
        if self.step_s == 0.0:
            self.step_s = duration_s
        self.step_s += STEP_WEIGHT * (min(duration_s, 2.0 * self.step_s) - self.step_s)

    def _end_tick(self, step: PeerRatios) -> float:
        """Return the seconds of the tick, and start the next. step: the tick's last one."""
        tick_s, self.tick_s, self.tick_steps = self.tick_s, 0.0, 0
        explained = step.explained
        usual = median(explained.values()) if explained else 0.0
        for number, value in step.references.items():
            self.references[number] = value + explained[number] if explained else value
            rank = self.ranks[number]
            rank.own.append(value + rank.window.newest)
            rank.work += (explained.get(number, usual) - usual - rank.work) / WORK_TICKS
        self.block_ticks += 1
        return tick_s

    def drop_missing(self, blocks: int) -> None:
        """Remove ranks that reported nothing for ``blocks``, at the end of a block."""
        for number, rank in list(self.ranks.items()):
            rank.missed_blocks += 1
            if rank.missed_blocks > blocks:
                del self.ranks[number]
                self.groups.pop(number, None)
                self.references.pop(number, None)

    def form_groups(self) -> None:
        """Group the ranks by their work, once those that are not slow have a baseline."""
        known = {number: rank for number, rank in self.ranks.items() if rank.is_ready}
        levels = {number: rank.baseline.center for number, rank in known.items()}
        if not levels:
            return
        noise = GROUP_NOISE_FACTOR * self.noise
        self.groups = {**self.stages} or group_by_level(levels, max(STAGE_GAP, noise))
        for number, rank in known.items():
            if self.groups.get(number, ALONE) >= 0 and not self.stages:
                alike = [n for n in known if self.groups.get(n) == self.groups[number]]
                rank.baseline.shift(-median([levels[n] for n in alike if n != number]))
                rank.window.clear()
                rank.on, rank.above_ticks, rank.above_s = False, 0, 0.0


def error_of(ranks: Iterable[RankLevel]) -> float:
    """Return the standard error of full windows' medians, which reacts at once to uneven steps."""
    errors = [rank.window.error() for rank in ranks]
    return median(errors) if errors else 0.0


# Healthy GPUs of one job differ by 2 % (standard deviation; 9 % from the fastest to the slowest of
# thousands in PRISM, arXiv 2510.15596). This counts as much as four measured ranks.
PRIOR_SPREAD = 0.02
PRIOR_WEIGHT = 4
# At most this many ranks can be slow, eight GPUs of two nodes, and this share of all.
MAX_SLOW = 16
MAX_SLOW_SHARE = 1 / 4
# A single slow rank is twice as far above the middle as the next; two alike may be a stage.
LONE_FACTOR = 2.0


def peer_limit(
    levels: Mapping[int, float],
    groups: Mapping[int, int],
    deviations: float,
    error: float,
    are_alike: bool,
) -> float:
    """Return the limit of ``levels``, logs of the ratio of each rank to its peers.

    It is infinite if there are too few ranks. deviations: the normal noise that one healthy rank
    may show. error: the standard error of a level. are_alike: whether ranks of a group are known to
    do the same work. If not, only one rank can be slow, and two ranks are not compared: they may be
    two stages.
    """
    least = 2 if are_alike else 3
    if len(levels) < least:
        return math.inf
    ordered = sorted(levels, key=levels.__getitem__, reverse=True)
    most = min(MAX_SLOW, int(len(levels) * MAX_SLOW_SHARE)) if are_alike else 1
    found = math.inf
    for taken, rank in enumerate(ordered[: max(1, most)], 1):
        # The slowest ranks are removed one by one, as they do not belong to the scatter.
        left: dict[int, list[float]] = {}
        for peer in ordered[taken:]:
            left.setdefault(groups.get(peer, 0), []).append(levels[peer])
        freedom = PRIOR_WEIGHT + sum(len(group) - 1 for group in left.values())
        squares = PRIOR_WEIGHT * PRIOR_SPREAD**2 + sum(map(_squares, left.values()))
        limit = student(deviations, freedom + 1) * max(math.sqrt(squares / freedom), error)
        limit *= math.sqrt(1 + 1 / max(len(left.get(groups.get(rank, 0), ())), 1))
        if found == math.inf or levels[rank] >= limit:
            found = limit
    return found if are_alike else max(found, LONE_FACTOR * levels[ordered[1]])


def _squares(values: list[float]) -> float:
    """Return the sum of squares about the mean."""
    mean = sum(values) / len(values)
    return sum([(value - mean) ** 2 for value in values])
