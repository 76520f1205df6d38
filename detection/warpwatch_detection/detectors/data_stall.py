"""Detects steps that wait for input, by the share of ``data_wait`` in each rank's time.

A wait counts up to the time of one step, so a single slow batch does not count. A stall takes many
late steps: all of them may wait a little, or each third one long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from warpwatch_detection.detector import (
    WARMUP_STEPS,
    DetectorStatus,
    JobStep,
    Nearest,
    Results,
    StepsDetector,
    changed,
    deviations,
    job_status,
)
from warpwatch_detection.signals.baselines import PEER_FACTOR, FrozenBaseline, median_of_others
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId

# A block has at least this many steps and seconds, but ends at MAX_BLOCK_STEPS.
BLOCK_STEPS = 10
BLOCK_S = 1.0
MAX_BLOCK_STEPS = 200
# The baseline has up to this many blocks, and is used from READY_BLOCKS on.
BASELINE_BLOCKS = 40
READY_BLOCKS = 5
# Over eight blocks this share (TraceML warns at 10 %) and this rise above the baseline count.
LONG_BLOCKS = 8
MIN_SHARE = 0.10
MIN_RISE = 0.08
# Over three blocks this rise counts, which takes five late steps of thirty.
SHORT_BLOCKS = 3
SHORT_RISE = 0.15
# The limit of the short window is this many times that of the long one, as its noise is larger.
SHORT_FACTOR = 1.5
# A quarter of the time lost is a stall, even from the start. A detector that misses it is blind.
START_SHARE = 0.25
# The least noise of a share of the time.
MIN_SPREAD = 0.01
# A wait counts up to the step without waiting, and at least up to this share of the whole step.
LEAST_COUNTED_SHARE = 0.1
# If one rank stalls, ranks above this part of the limit stall too.
JOINT_EXCESS = 0.6
# A stall is over below this part of the limit.
RELEASE_EXCESS = 0.5


@dataclass(slots=True)
class RankWaits(Nearest):
    """One rank; ``counted`` and ``waits`` are the seconds per block with waits cut and whole.

    counted_s, wait_s, seen_steps: the open block so far. from_start: whether the stall began before
    a baseline was known. begin_step: the first step of the stall. excess: the rise over its limit.
    """

    baseline: FrozenBaseline = field(default_factory=lambda: FrozenBaseline(MIN_SPREAD))
    counted_s: float = 0.0
    wait_s: float = 0.0
    seen_steps: int = 0
    counted: list[float] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    on: bool = False
    from_start: bool = False
    begin_step: int = 0
    excess: float = 0.0

    def end_block(self) -> None:
        self.counted = [*self.counted[1 - LONG_BLOCKS :], self.counted_s]
        self.waits = [*self.waits[1 - LONG_BLOCKS :], self.wait_s]
        self.seen_steps, self.counted_s, self.wait_s = 0, 0.0, 0.0


@dataclass(slots=True)
class JobWaits:
    """The ranks of one job.

    steps, work_s, elapsed_s: the open block so far. works, spans: the seconds per block without
    waits and in all, newest last. first_steps: the first step of each block. spreads: the spreads
    of the ranks' baselines, sorted.
    """

    ranks: dict[int, RankWaits] = field(default_factory=dict)
    index: int = -1
    steps: int = 0
    work_s: float = 0.0
    elapsed_s: float = 0.0
    works: list[float] = field(default_factory=list)
    spans: list[float] = field(default_factory=list)
    first_steps: list[int] = field(default_factory=list)
    spreads: list[float] = field(default_factory=list)
    on: bool = False

    def add(self, seen: JobStep) -> None:
        if self.steps == 0:
            self.first_steps = [*self.first_steps[1 - LONG_BLOCKS :], seen.step]
        most_s = max(seen.common_s, LEAST_COUNTED_SHARE * seen.duration_s)
        for number, wait_s in seen.data_wait_s.items():
            rank = self.ranks.get(number) or self.ranks.setdefault(number, RankWaits())
            rank.counted_s += wait_s if wait_s < most_s else most_s
            rank.wait_s += wait_s
            rank.seen_steps += 1
        self.steps += 1
        self.work_s += seen.common_s
        self.elapsed_s += seen.duration_s

    def end_block(self) -> None:
        self.works = [*self.works[1 - LONG_BLOCKS :], self.work_s]
        self.spans = [*self.spans[1 - LONG_BLOCKS :], self.elapsed_s]
        self.steps, self.work_s, self.elapsed_s = 0, 0.0, 0.0
        for number, rank in list(self.ranks.items()):
            if rank.seen_steps:
                rank.end_block()
            else:
                del self.ranks[number]

    def share(self, rank: RankWaits, blocks: int) -> float:
        """Return the share of waits in the last ``blocks``, or in fewer for a new rank."""
        waits = rank.counted[-blocks:]
        waited_s = sum(waits)
        total_s = waited_s + sum(self.works[-len(waits) :])
        return waited_s / total_s if total_s > 0 else 0.0


class DataStall(StepsDetector[JobWaits]):
    kind = "data_stall"
    state_of = JobWaits

    def evaluate(self, job: JobWaits, seen: JobStep) -> Results:
        if seen.index < WARMUP_STEPS:
            return ()
        job.add(seen)
        full = job.steps >= BLOCK_STEPS and job.elapsed_s >= BLOCK_S
        if not full and job.steps < MAX_BLOCK_STEPS:
            return ()
        job.end_block()
        known = (rank.baseline for rank in job.ranks.values() if rank.baseline.blocks)
        job.spreads = sorted(baseline.spread for baseline in known)
        for rank in job.ranks.values():
            self._check(job, rank, seen)
        stalled = {number: rank for number, rank in job.ranks.items() if rank.on}
        was_on, job.on = job.on, bool(stalled)
        stalled.update((n, r) for n, r in job.ranks.items() if job.on and r.excess >= JOINT_EXCESS)
        found = self._found(job, stalled, seen) if stalled else None
        return changed(seen.job_id, seen.time, was_on, found)

    def _check(self, job: JobWaits, rank: RankWaits, seen: JobStep) -> None:
        """Check a rank after a block: find or end its stall, or learn the block."""
        baseline, block = rank.baseline, job.share(rank, 1)
        count = len(baseline.blocks)
        noise = self._noise(job, rank) if count >= READY_BLOCKS else 0.0
        # A stall that starts within the first blocks makes them noisy. A baseline that misses a
        # stall continues to learn, so that it starts again at the stall's level.
        is_blind = count < BASELINE_BLOCKS and noise >= START_SHARE and not rank.on
        if count < READY_BLOCKS or is_blind:
            self._learn(rank, block, job.first_steps[-1])
            return
        least, short = self._least_rise(rank, noise), max(SHORT_RISE, SHORT_FACTOR * noise)
        rank.excess = max(
            (job.share(rank, LONG_BLOCKS) - baseline.center) / least,
            (job.share(rank, SHORT_BLOCKS) - baseline.center) / short,
        )
        rank.reach(rank.excess, seen.step)
        if rank.excess >= 1 and not rank.on:
            rank.on = True
            if not rank.from_start:
                rank.begin_step = self._begin_step(job, rank)
        elif rank.from_start and job.share(rank, LONG_BLOCKS) < RELEASE_EXCESS * START_SHARE:
            # There were no healthy waits before, so they are learned now.
            rank.on = rank.from_start = False
            rank.baseline, rank.excess = FrozenBaseline(MIN_SPREAD), 0.0
            return
        elif rank.excess < RELEASE_EXCESS:
            rank.on = rank.from_start = False
        if not rank.on and block - baseline.center <= -least:
            baseline.learn_lower(block, BASELINE_BLOCKS)
        elif not rank.on and block - baseline.center < least:
            baseline.learn(block, BASELINE_BLOCKS)

    @staticmethod
    def _learn(rank: RankWaits, block: float, first_step: int) -> None:
        """Learn a block before the baseline is ready. If that is a stall, no waits are usual."""
        baseline = rank.baseline
        baseline.begin_again(block, START_SHARE)
        baseline.learn(block, BASELINE_BLOCKS)
        if len(baseline.blocks) == 1:
            rank.begin_step = first_step if baseline.restarts else 0
        if len(baseline.blocks) == READY_BLOCKS and baseline.center >= START_SHARE:
            baseline.center, baseline.spread = 0.0, MIN_SPREAD
            rank.from_start = True

    def _noise(self, job: JobWaits, rank: RankWaits) -> float:
        """Return the change of a share by chance; a long window has two independent checks."""
        check_s = sum(job.spans) / 2
        own = rank.baseline.spread
        most = PEER_FACTOR * median_of_others(job.spreads, own)
        return min(own, most) * deviations(self._rate_per_s, check_s, len(job.ranks))

    @staticmethod
    def _least_rise(rank: RankWaits, noise: float) -> float:
        """Return the rise above the baseline from which the long window is a stall."""
        return max(MIN_RISE, MIN_SHARE - rank.baseline.center, noise)

    @staticmethod
    def _begin_step(job: JobWaits, rank: RankWaits) -> int:
        """Return the first step of the newest blocks in a row that waited half of MIN_RISE."""
        least = rank.baseline.center + MIN_RISE / 2
        begin = job.first_steps[-1]
        blocks = zip(rank.counted[::-1], job.works[::-1], job.first_steps[::-1], strict=False)
        for counted, work, step in blocks:
            if counted <= least * (work + counted):
                break
            begin = step
        return begin

    @staticmethod
    def _found(job: JobWaits, stalled: Mapping[int, RankWaits], seen: JobStep) -> Detected:
        worst = max(stalled, key=lambda number: stalled[number].excess)
        rank, blocks = stalled[worst], SHORT_BLOCKS
        level = sum(rank.waits[-blocks:]) / max(sum(job.spans[-blocks:]), 1e-9)
        baseline = None if rank.from_start else rank.baseline.center
        who = f"rank {worst} waits" if len(stalled) == 1 else f"{len(stalled)} ranks wait"
        before = "" if baseline is None else f" instead of {100 * baseline:.0f} %"
        if not rank.begin_step:
            before = " from the start"
        text = (
            f"{who} for data {100 * min(level, 1.0):.0f} % of the time{before}, since step "
            f"{rank.begin_step}"
        )
        alone = worst if len(stalled) == 1 and len(job.ranks) > 1 else None
        return seen.found(text, min(level, 1.0), baseline, rank=alone, begin_step=rank.begin_step)

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            for number, rank in job.ranks.items():
                yield self._status(name, job, number, rank)

    def _status(self, name: JobId, job: JobWaits, number: int, rank: RankWaits) -> DetectorStatus:
        usual, known = rank.baseline.center, len(rank.baseline.blocks)
        if known < READY_BLOCKS:
            text = f"rank {number}: {known} of {READY_BLOCKS} blocks of the baseline are known"
            return job_status(name, False, text, learns=True, rank=number)
        value, least = job.share(rank, LONG_BLOCKS), self._least_rise(rank, self._noise(job, rank))
        text = (
            f"rank {number} waits for data {100 * value:.1f} % of the time, usually "
            f"{100 * usual:.1f} %, limit {100 * (usual + least):.1f} %"
        )
        more = {"baseline": usual, "sees": least, "effect": START_SHARE}
        return job_status(name, rank.on, text, value, usual + least, rank, rank=number, **more)
