"""Joined steps of a job, without the engine: what tests of single detectors are fed."""

import math
import random
from collections.abc import Callable, Iterable

from tests.detection.streams import EPOCH_S
from warpwatch_detection.detector import Cleared, Detector, JobStep
from warpwatch_detection.job_steps import JobSteps
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import Record

Extra = Callable[[int], float]


def none(step: int) -> float:
    return 0.0


class Steps:
    """``compute``, ``comm``: seconds on top of 0.8 and 0.2 of ``step_s``, by step."""

    def __init__(self, step_s: float = 1.0, noise: float = 0.01, seed: int = 1, first: int = 0):
        self.step_s, self.noise, self.first = step_s, noise, first
        self.time, self.step = EPOCH_S, 0
        self._random = random.Random(seed)

    def next(
        self, count: int, compute: Extra = none, comm: Extra = none, tokens: Extra | None = None
    ) -> Iterable[JobStep]:
        for _ in range(count):
            noisy = math.exp(self.noise * self._random.gauss(0, 1))
            work = 1.0 if tokens is None else tokens(self.step) / 1000
            compute_s = 0.8 * self.step_s * noisy * work + compute(self.step)
            comm_s = 0.2 * self.step_s * noisy + comm(self.step)
            self.time += compute_s + comm_s
            yield JobStep(
                time=self.time,
                job_id=JobId("", "llama", ""),
                step=self.first + self.step,
                index=self.step,
                duration_s=compute_s + comm_s,
                common_s=compute_s + comm_s,
                compute_s={0: compute_s},
                data_wait_s={0: 0.0},
                comm_s={0: comm_s},
                tokens={} if tokens is None else {0: int(tokens(self.step))},
                work=0.0 if tokens is None else float(int(tokens(self.step))),
            )
            self.step += 1


def joined(records: Iterable[Record], steps: JobSteps | None = None) -> list[JobStep]:
    steps = steps or JobSteps()
    found = [steps.observe(record) for record in records]
    return [step for step in found if step is not None]


def begun(detector: Detector, steps: Iterable[JobStep]) -> list[Detected]:
    """Return a detector's findings without the repetitions of those that last."""
    found: list[Detected] = []
    lasts = False
    for step in steps:
        for result in detector.observe(step):
            if isinstance(result, Cleared):
                lasts = False
            elif not lasts:
                lasts = True
                found.append(result)
    return found
