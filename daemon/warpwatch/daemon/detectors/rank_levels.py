"""One value of each rank, block by block, against the rank's own baseline.

What data_stall and straggler share: collecting blocks, ranks that come and go, and the answer for
the whole job.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from warpwatch.daemon.config import RankLevelConfig
from warpwatch.daemon.detectors.base import Fine, Found, JobStep, Observation, Timeless, Verdict
from warpwatch.daemon.detectors.level import Baseline, BlockSpan, Persistence

C = TypeVar("C", bound=RankLevelConfig)


class RankLevel:
    """A rank: the values of the running block, and how its level stands to its baseline.

    level: of the newest whole block; reference: what it was compared with.
    """

    def __init__(self, config: RankLevelConfig) -> None:
        self.values: list[float] = []
        self.baseline = Baseline(config.baseline_blocks, config.ready_blocks)
        self.level = 0.0
        self.reference = 0.0
        self._state = Persistence(config.hold_blocks, config.hold_s)
        self._from_start = Persistence(config.start_blocks)

    @property
    def on(self) -> bool:
        return self._state.on or self._from_start.on

    @property
    def from_start(self) -> bool:
        """It has been so since before there was a baseline."""
        return self._from_start.on

    @property
    def begin_step(self) -> int:
        return (self._from_start if self._from_start.on else self._state).begin_step

    def judge(self, excess: float, value: float, span: BlockSpan, calm: bool) -> None:
        """``excess``: the rise over its limit. A ``calm`` value is healthy: it is learned from."""
        state = self._state if self.baseline.ready else self._from_start
        if not state.update(excess, span) and calm:
            self.baseline.add(value)


class JobLevels:
    """The ranks of one job over a block of its steps."""

    def __init__(self, config: RankLevelConfig) -> None:
        self._config = config
        self.span = BlockSpan(config.block_steps, config.block_s)
        self.ranks: dict[int, RankLevel] = {}
        self.on = False

    def add(self, seen: JobStep, values: Mapping[int, float]) -> bool:
        """True when the block is full."""
        if self.ranks.keys() != values.keys():
            # Ranks came or went: the block begins anew.
            self.ranks = {r: self.ranks.get(r) or RankLevel(self._config) for r in values}
            self.restart()
        for rank, value in values.items():
            self.ranks[rank].values.append(value)
        return self.span.add(seen.step, seen.duration_s)

    def restart(self) -> None:
        for rank in self.ranks.values():
            rank.values.clear()
        self.span.restart()


class RankLevelDetector(Timeless, ABC, Generic[C]):
    """A detector that says ``values``, ``judge`` and ``found``; the rest is here."""

    kind: str
    reads = (JobStep,)

    def __init__(self, config: C) -> None:
        self._config = config
        self._jobs: dict[str, JobLevels] = {}

    @abstractmethod
    def values(self, seen: JobStep) -> Mapping[int, float]:
        """What is watched, in seconds by rank."""

    @abstractmethod
    def judge(self, job: JobLevels) -> None:
        """A block is full: set every rank's level and judge it."""

    @abstractmethod
    def found(self, job: JobLevels, ranks: list[int], seen: JobStep) -> Found:
        """What to say of the ranks whose level is too high."""

    def observe(self, seen: Observation) -> Iterable[Verdict]:
        assert isinstance(seen, JobStep)
        if seen.index < self._config.warmup_steps:
            return ()
        job = self._jobs.get(seen.job)
        if job is None:
            job = self._jobs[seen.job] = JobLevels(self._config)
        if not job.add(seen, self.values(seen)):
            return ()
        self.judge(job)
        job.restart()
        ranks = [number for number, rank in job.ranks.items() if rank.on]
        was_on, job.on = job.on, bool(ranks)
        if ranks:
            return (self.found(job, ranks, seen),)
        return (Fine(seen.time, seen.job),) if was_on else ()

    def forget(self, job: str) -> None:
        self._jobs.pop(job, None)
