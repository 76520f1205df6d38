"""What a capture cost: the job's step time before, during and after it."""

from __future__ import annotations

import statistics
from collections import deque

from warpwatch.telemetry.records import Step

BEFORE_STEPS = 20
AFTER_STEPS = 10


class StepCost:
    """Fed with the steps of one rank of the job, in order."""

    def __init__(self, before_s: tuple[float, ...]) -> None:
        self._before = before_s[-BEFORE_STEPS:]
        self._during: list[float] = []
        self._after: deque[float] = deque(maxlen=AFTER_STEPS)

    def add(self, step: Step, first_step: int, last_step: int) -> None:
        if first_step <= step.step <= last_step:
            self._during.append(step.duration_s)
        # The step after the last one pays for stopping and export.
        elif step.step > last_step + 1:
            self._after.append(step.duration_s)

    @property
    def complete(self) -> bool:
        return len(self._after) == AFTER_STEPS

    def medians(self) -> dict[str, float]:
        """Seconds under ``before``, ``during`` and ``after``, as far as known."""
        parts = {"before": self._before, "during": self._during, "after": self._after}
        return {name: statistics.median(steps) for name, steps in parts.items() if steps}
