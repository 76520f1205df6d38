"""Steps that wait for input: the share of ``data_wait`` in the time, per rank.

A wait counts as one step's time at most, so that a lone slow batch is no stall and a stall takes
many late steps, whether all of them wait a little or each third one waits long.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from warpwatch_detection.config_ranks import DataStallConfig
from warpwatch_detection.detector import DetectorStatus, Fine, JobDetector, JobStep, Verdict
from warpwatch_detection.signals.frozen_baseline import FrozenBaseline
from warpwatch_telemetry.anomalies import Found

# A block ends at this many steps whatever time it spans.
MAX_BLOCK_STEPS = 200
# Shares of the time are not known better than this.
MIN_SPREAD = 0.01
# A wait counts up to the step without waiting, and at least up to this share of the whole one.
LEAST_COUNTED_SHARE = 0.1
# Beside one that stalls, ranks that have reached this part of the limit stall too.
JOINT_EXCESS = 0.6
# A stall is over below this part of the limit.
RELEASE_EXCESS = 0.5


@dataclass(slots=True)
class RankWaits:
    """Seconds per block, newest last: ``counted`` with every wait cut, ``waits`` as they were."""

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
    nearest: float = 0.0
    nearest_step: int | None = None


@dataclass(slots=True)
class JobWaits:
    """Seconds per block, newest last: of steps without waiting, and of whole steps.

    work_sums: of the newest one, two, ... of ``works``.
    """

    ranks: dict[int, RankWaits] = field(default_factory=dict)
    index: int = -1
    steps: int = 0
    work_s: float = 0.0
    elapsed_s: float = 0.0
    works: list[float] = field(default_factory=list)
    work_sums: list[float] = field(default_factory=list)
    spans: list[float] = field(default_factory=list)
    first_steps: list[int] = field(default_factory=list)
    on: bool = False


@dataclass(slots=True)
class DataStallState:
    jobs: dict[str, JobWaits] = field(default_factory=dict)


class DataStall(JobDetector[JobWaits]):
    kind = "data_stall"

    def __init__(self, config: DataStallConfig) -> None:
        self._config = config
        self.state = DataStallState()

    def begin(self) -> JobWaits:
        return JobWaits()

    def judge(self, job: JobWaits, seen: JobStep) -> Iterable[Verdict]:
        if seen.index < self._config.warmup_steps:
            return ()
        self._add(job, seen)
        full = job.steps >= self._config.block_steps and job.elapsed_s >= self._config.block_s
        if not full and job.steps < MAX_BLOCK_STEPS:
            return ()
        self._end_block(job)
        return self._judge_block(job, seen)

    def _add(self, job: JobWaits, seen: JobStep) -> None:
        if job.steps == 0:
            job.first_steps = [*job.first_steps[1 - self._config.long_blocks :], seen.step]
        most_s, least_s = seen.common_s, LEAST_COUNTED_SHARE * seen.duration_s
        if most_s < least_s:
            most_s = least_s
        ranks = job.ranks
        for number, wait_s in seen.data_wait_s.items():
            try:
                rank = ranks[number]
            except KeyError:
                rank = ranks[number] = RankWaits()
            rank.counted_s += wait_s if wait_s < most_s else most_s
            rank.wait_s += wait_s
            rank.seen_steps += 1
        job.steps += 1
        job.work_s += seen.common_s
        job.elapsed_s += seen.duration_s

    def _end_block(self, job: JobWaits) -> None:
        keep = 1 - self._config.long_blocks
        job.works = works = [*job.works[keep:], job.work_s]
        job.work_sums = [sum(works[-count:]) for count in range(1, len(works) + 1)]
        job.spans = [*job.spans[keep:], job.elapsed_s]
        job.steps, job.work_s, job.elapsed_s = 0, 0.0, 0.0
        for number, rank in list(job.ranks.items()):
            if rank.seen_steps == 0:
                del job.ranks[number]
                continue
            rank.counted = [*rank.counted[keep:], rank.counted_s]
            rank.waits = [*rank.waits[keep:], rank.wait_s]
            rank.seen_steps, rank.counted_s, rank.wait_s = 0, 0.0, 0.0

    def _judge_block(self, job: JobWaits, seen: JobStep) -> Iterable[Verdict]:
        for rank in job.ranks.values():
            self._judge_rank(job, rank, seen)
        stalled = {number: rank for number, rank in job.ranks.items() if rank.on}
        was_on, job.on = job.on, bool(stalled)
        if not stalled:
            return (Fine(seen.time, seen.job),) if was_on else ()
        stalled.update((n, r) for n, r in job.ranks.items() if r.excess >= JOINT_EXCESS)
        return (self._found(job, stalled, seen),)

    def _judge_rank(self, job: JobWaits, rank: RankWaits, seen: JobStep) -> None:
        config, baseline = self._config, rank.baseline
        block = share(rank.counted, job.work_sums, 1)
        if len(baseline.blocks) < config.ready_blocks:
            baseline.begin_anew(block, config.start_share)
            baseline.learn(block, config.baseline_blocks)
            if len(baseline.blocks) == config.ready_blocks:
                self._begin(rank)
            return
        short = share(rank.counted, job.work_sums, config.short_blocks) - baseline.center
        long = share(rank.counted, job.work_sums, config.long_blocks) - baseline.center
        noise = config.noise_factor * baseline.spread
        least = max(config.min_rise, config.min_share - baseline.center, noise)
        rank.excess = max(long / least, short / max(config.short_share, 1.5 * noise))
        if rank.excess > rank.nearest:
            rank.nearest, rank.nearest_step = rank.excess, seen.step
        if rank.excess >= 1 and not rank.on:
            rank.on, rank.begin_step = True, self._begin_step(job, rank)
        elif rank.excess < RELEASE_EXCESS:
            rank.on = rank.from_start = False
        if not rank.on and block - baseline.center <= -least:
            baseline.learn_lower(block, config.baseline_blocks)
        elif not rank.on and block - baseline.center < least:
            baseline.learn(block, config.baseline_blocks)

    def _begin(self, rank: RankWaits) -> None:
        """The baseline is ready: if it is a stall itself, health is not to wait."""
        if rank.baseline.center >= self._config.start_share:
            rank.baseline.impose(0.0)
            rank.baseline.spread = MIN_SPREAD
            rank.from_start = True

    def _begin_step(self, job: JobWaits, rank: RankWaits) -> int:
        """The first step of the blocks in a row that waited half of what is found, or more."""
        if rank.from_start:
            return 0
        least = rank.baseline.center + self._config.min_rise / 2
        begin = job.first_steps[-1]
        blocks = zip(rank.counted[::-1], job.works[::-1], job.first_steps[::-1], strict=False)
        for counted, work, step in blocks:
            if counted <= least * (work + counted):
                break
            begin = step
        return begin

    def _found(self, job: JobWaits, stalled: Mapping[int, RankWaits], seen: JobStep) -> Found:
        worst = max(stalled, key=lambda number: stalled[number].excess)
        rank, blocks = stalled[worst], self._config.short_blocks
        level = sum(rank.waits[-blocks:]) / max(sum(job.spans[-blocks:]), 1e-9)
        baseline = None if rank.from_start else rank.baseline.center
        who = f"rank {worst} waits" if len(stalled) == 1 else f"{len(stalled)} ranks wait"
        before = "from the start" if baseline is None else f"instead of {100 * baseline:.0f} %"
        return Found(
            time=seen.time,
            severity="warning",
            job=seen.job,
            rank=worst if len(stalled) == 1 and len(job.ranks) > 1 else None,
            step=seen.step,
            begin_step=rank.begin_step,
            value=min(level, 1.0),
            baseline=baseline,
            summary=f"{who} for data {100 * min(level, 1.0):.0f} % of the time {before}, "
            f"since step {rank.begin_step}",
        )

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, job in self.state.jobs.items():
            for number, rank in job.ranks.items():
                yield self._status(name, job, number, rank)

    def _status(self, name: str, job: JobWaits, number: int, rank: RankWaits) -> DetectorStatus:
        config, baseline = self._config, rank.baseline
        known, ready = len(baseline.blocks), config.ready_blocks
        if known < ready:
            text = f"rank {number}: {known} of {ready} blocks of the baseline are known"
            return DetectorStatus("learning", text, name, number)
        value = share(rank.counted, job.work_sums, config.long_blocks)
        noise = config.noise_factor * baseline.spread
        limit = max(baseline.center + max(config.min_rise, noise), config.min_share)
        return DetectorStatus(
            "found" if rank.on else "fine",
            f"rank {number} waits for data {100 * value:.1f} % of the time, usually "
            f"{100 * baseline.center:.1f} %; found from {100 * limit:.1f} % on",
            job=name,
            rank=number,
            value=value,
            baseline=baseline.center,
            limit=limit,
            nearest=rank.nearest,
            nearest_step=rank.nearest_step,
        )


def share(counted: Sequence[float], work_sums: Sequence[float], blocks: int) -> float:
    """Waiting in the time of the last ``blocks``; fewer, if it has not seen so many."""
    waits = counted[-blocks:]
    waited_s = sum(waits)
    total_s = waited_s + work_sums[len(waits) - 1]
    return waited_s / total_s if total_s > 0 else 0.0
