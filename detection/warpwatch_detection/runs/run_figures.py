"""The figures of one run, as its steps come."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Mapping
from typing import Any

from warpwatch_detection.detector import WARMUP_STEPS
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.records import Step

# Not what a step takes, but what stands between two.
PAUSES = ("checkpoint", "eval")
OTHER = "other"


class RunFigures:
    """``before``: what was kept of the run by an earlier daemon; steps until then are in it."""

    def __init__(self, before: RunSummary | None = None) -> None:
        self.anomalies: Counter[str] = Counter()
        self.energy_before_j = 0.0
        self._histogram = StepHistogram()
        self._seconds = 0.0
        self._tokens = self._samples = 0.0
        self._phases_s: dict[str, float] = {}
        # Steps of each rank that were passed over.
        self._warmup: Counter[int] = Counter()
        self._known_until = 0.0
        self._is_known = before is not None
        if before is not None:
            self._take_over(before)

    def _take_over(self, before: RunSummary) -> None:
        self._histogram = StepHistogram(before.step_counts)
        count = self._histogram.count
        self._phases_s = {name: mean_s * count for name, mean_s in before.phases_s.items()}
        self._seconds = sum(self._phases_s.values())
        self._phases_s.pop(OTHER, None)
        self._tokens = (before.tokens_per_step or 0.0) * count
        self._samples = (before.samples_per_step or 0.0) * count
        self.anomalies.update(before.anomalies)
        self.energy_before_j = before.energy_j or 0.0
        self._known_until = before.time

    @property
    def judged_steps(self) -> int:
        return self._histogram.count

    def add(self, step: Step) -> None:
        if step.profiled or step.time <= self._known_until:
            return
        if not self._is_known and self._warmup[step.rank] < WARMUP_STEPS:
            self._warmup[step.rank] += 1
            return
        pauses_s = sum(step.phases_s.get(name, 0.0) for name in PAUSES)
        duration_s = max(0.0, step.duration_s - pauses_s)
        self._histogram.add(duration_s)
        self._seconds += duration_s
        self._tokens += step.tokens
        self._samples += step.samples
        for name, seconds in step.phases_s.items():
            if name not in PAUSES:
                self._phases_s[name] = self._phases_s.get(name, 0.0) + seconds

    def fields(self, ranks: int) -> dict[str, Any]:
        """Of RunSummary, as far as steps say it; ``ranks``: how many there are."""
        count, seconds = self._histogram.count, self._seconds
        if not count:
            return {"anomalies": dict(self.anomalies)}
        phases_s = {name: total / count for name, total in self._phases_s.items()}
        other_s = seconds / count - sum(phases_s.values())
        found = {
            "judged_steps": count,
            "step_p50_s": self._histogram.percentile(0.5),
            "step_p95_s": self._histogram.percentile(0.95),
            "phases_s": {**phases_s, OTHER: max(0.0, other_s)},
            "anomalies": dict(self.anomalies),
            "step_counts": self._histogram.counts,
        }
        for name, total in (("tokens", self._tokens), ("samples", self._samples)):
            if total and seconds > 0:
                found[f"{name}_per_step"] = total / count
                found[f"{name}_per_s"] = ranks * total / seconds
        return found


# A bin's upper edge by its lower one: a percentile is right to 1 %.
GROWTH = 1.02
LEAST_S = 1e-4
# Up to a day.
BINS = math.ceil(math.log(86400.0 / LEAST_S) / math.log(GROWTH)) + 1
_SCALE = 1 / math.log(GROWTH)


class StepHistogram:
    """How long steps take, in bins of equal ratio; 8 kB.

    As DDSketch (Masson, Rim and Lee 2019) has them: a percentile is right to a part of itself,
    however the values are spread. ``counts``: as the property of the same name gives them.
    """

    def __init__(self, counts: Mapping[int, int] | None = None) -> None:
        self._bins = array("Q", bytes(8 * BINS))
        self.count = 0
        for number, count in (counts or {}).items():
            if 0 <= number < BINS and 0 < count < 2**48:
                self._bins[number] = count
                self.count += count

    def add(self, duration_s: float) -> None:
        number = int(math.log(max(duration_s, LEAST_S) / LEAST_S) * _SCALE)
        self._bins[min(number, BINS - 1)] += 1
        self.count += 1

    @property
    def counts(self) -> dict[int, int]:
        """By the number of the bin, which begins at LEAST_S · GROWTH ** number."""
        return {number: count for number, count in enumerate(self._bins) if count}

    def percentile(self, share: float) -> float | None:
        """What ``share`` (0 to 1) of the steps do not exceed, in seconds; None without steps."""
        left = share * self.count
        for number, count in enumerate(self._bins):
            if count and left <= count:
                return LEAST_S * math.exp((number + 0.5) / _SCALE)
            left -= count
        return None
