"""What a capture cost: the job's step time before, during and after it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence

from warpwatch_telemetry.captures import Residual
from warpwatch_telemetry.records import Step

BASELINE_STEPS = 30
AFTER_STEPS = 20
# With fewer on either side nothing is said of a residual.
MIN_STEPS = 10
# The job is slower since: this much, and more than chance explains (one-sided p < 0.001).
RESIDUAL_RATIO = 1.05
SIGNIFICANT_Z = 3.1


class Baselines:
    """The newest steps of every rank that no capture disturbed, in seconds."""

    def __init__(self) -> None:
        self._steps_s: dict[tuple[str, int], deque[float]] = {}

    def add(self, step: Step) -> None:
        if not step.profiled:
            new: deque[float] = deque(maxlen=BASELINE_STEPS)
            self._steps_s.setdefault((step.job, step.rank), new).append(step.duration_s)

    def forget(self, job: str, rank: int | None) -> None:
        """``rank`` None: all of the job's."""
        for key in [key for key in self._steps_s if key[0] == job and rank in (None, key[1])]:
            del self._steps_s[key]

    def of_rank(self, job: str, rank: int) -> tuple[float, ...]:
        return tuple(self._steps_s.get((job, rank), ()))


class StepCost:
    """Fed with the steps of one rank of the job, in order; ``before_s``: its steps until now."""

    def __init__(self, before_s: Sequence[float] = ()) -> None:
        self._before_s = list(before_s)
        self._during_s: list[float] = []
        self._paid_s: list[float] = []
        self._after_s: list[float] = []
        self._interrupted = False

    def add(self, step: Step, first_step: int, last_step: int) -> None:
        """``first_step`` to ``last_step`` are recorded; those beside them start and stop it."""
        if self.complete:
            return
        if not step.profiled:
            if self._paid_s:
                self._after_s.append(step.duration_s)
        elif self._after_s:
            # Another capture: the steps from here on are not this one's doing.
            self._interrupted = True
        else:
            self._paid_s.append(step.duration_s)
            if first_step <= step.step <= last_step:
                self._during_s.append(step.duration_s)

    @property
    def complete(self) -> bool:
        return self._interrupted or len(self._after_s) >= AFTER_STEPS

    def medians(self) -> dict[str, float]:
        """Seconds under ``before``, ``during`` and ``after``, as far as known."""
        parts = {"before": self._before_s, "during": self._during_s, "after": self._after_s}
        return {name: statistics.median(steps_s) for name, steps_s in parts.items() if steps_s}

    def cost_s(self) -> float | None:
        """What the job lost: starting, recorded and stopping steps less what they used to take."""
        if not self._before_s or not self._paid_s:
            return None
        return sum(self._paid_s) - len(self._paid_s) * statistics.median(self._before_s)

    def residual(self) -> Residual | None:
        """None when there are too few steps on one side."""
        steps = min(len(self._before_s), len(self._after_s))
        before_s = statistics.median(self._before_s) if self._before_s else 0.0
        if steps < MIN_STEPS or before_s <= 0:
            return None
        ratio = statistics.median(self._after_s) / before_s
        sure = rank_sum_z(self._before_s, self._after_s) > SIGNIFICANT_Z
        return Residual(ratio, steps, sure and ratio > RESIDUAL_RATIO)


def rank_sum_z(before: Sequence[float], after: Sequence[float]) -> float:
    """The z of Mann and Whitney's U test: how surely ``after`` is larger, whatever its form.

    Normal approximation without correction for ties (Mann and Whitney 1947), good from about
    ten values a side.
    """
    larger = sum((b > a) + (b == a) / 2 for a in before for b in after)
    pairs = len(before) * len(after)
    return (larger - pairs / 2) / math.sqrt(pairs * (len(before) + len(after) + 1) / 12)
