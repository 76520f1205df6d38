"""Synthetic telemetry: what the detector tests feed, in event time from a fixed epoch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from warpwatch_detection.config import DetectionConfig
from warpwatch_detection.engine import Detection
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.records import RankSeen, Record, Step

EPOCH_S = 1_700_000_000.0

# (step, rank) -> seconds of that rank's own compute or data wait on top of the healthy ones.
Extra = Callable[[int, int], float]


def nothing(step: int, rank: int) -> float:
    return 0.0


class Job:
    """A synchronous data-parallel job: the slowest rank sets the pace, the others wait in comm."""

    def __init__(self, ranks: int = 2, step_s: float = 0.04, noise: float = 0.2, seed: int = 1):
        self.ranks = ranks
        self.step_s = step_s
        self.noise = noise
        self.time = EPOCH_S
        self.step = 0
        self._random = random.Random(seed)

    def seen(self) -> Iterator[Record]:
        for rank in range(self.ranks):
            yield RankSeen(self.time, "llama", rank, self.ranks, f"GPU-{rank}")

    def steps(
        self,
        count: int,
        compute: Extra = nothing,
        wait: Extra = nothing,
        pause: Extra = nothing,
    ) -> Iterator[Step]:
        """``pause`` is spent by all ranks in no declared phase, as an undeclared checkpoint is."""
        for _ in range(count):
            works, waits = [], []
            for rank in range(self.ranks):
                noisy = self._random.lognormvariate(0.0, self.noise)
                works.append(0.8 * self.step_s * noisy + compute(self.step, rank))
                waits.append(0.01 * self.step_s * noisy + wait(self.step, rank))
            paused = pause(self.step, 0)
            local = max(work + wait_s for work, wait_s in zip(works, waits, strict=True))
            duration = local + 0.1 * self.step_s + paused
            self.time += duration
            for rank in range(self.ranks):
                comm = duration - paused - works[rank] - waits[rank]
                phases = {"data_wait": waits[rank], "comm": comm}
                yield Step(self.time, "llama", rank, self.step, duration, phases_s=phases)
            self.step += 1


def detection(**sections: Any) -> Detection:
    """The engine with the defaults and what ``sections`` (of ``detection``) change."""
    return Detection(DetectionConfig.model_validate(sections))


def fed(engine: Detection, records: Iterable[Record]) -> list[Anomaly]:
    """What the records opened, changed or closed."""
    return [change.anomaly for record in records for change in engine.feed(record)]


def opened(engine: Detection, records: Iterable[Record]) -> list[Anomaly]:
    """What was raised while ``records`` were fed."""
    changes = (change for record in records for change in engine.feed(record))
    return [change.anomaly for change in changes if change.what in ("opened", "reopened")]
