"""Detects a run whose steps take longer than those of the job's earlier runs.

The daemon compares runs periodically (event ``compared``): the median of the steps after warm-up
with that of earlier runs with the same world size, GPU model and work per step. Detectors that
learn from the run itself miss a run that is slow from its first step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from warpwatch_detection.detector import (
    DetectorStatus,
    JobsDetector,
    Nearest,
    Results,
    changed,
    detail_number,
    job_found,
    job_status,
    number,
)
from warpwatch_detection.signals.baselines import SIGMA_PER_MAD
from warpwatch_telemetry.anomalies import Detected
from warpwatch_telemetry.records import RankEvent

EVENT = "compared"
# The median of this many steps of a rank is stable.
MIN_STEPS = 100
# The least difference that counts. It is more than the histogram's error of 1 %.
MIN_EFFECT = 0.05
# The spread of fewer runs is unknown. GPUs of one model differ by 8 % on average (Sinha et al., SC
# 2022), and the next run may be on other GPUs.
KNOWN_RUNS = 3
UNKNOWN_SPREAD = 0.10
# In a normal distribution 1 in 740 is above three deviations.
DEVIATIONS = 3.0
# The anomaly is over below this part of the way to the limit.
RELEASE = 0.5
MAX_RUNS = 16
MAX_PHASES = 128


@dataclass(slots=True)
class RunLevel(Nearest):
    """The newest comparison of a run. runs: the number of earlier ones."""

    step_s: float = 0.0
    earlier_s: float = 0.0
    limit_s: float = 0.0
    runs: int = 0
    phase: str = ""
    on: bool = False

    @property
    def excess(self) -> float:
        """The part of the way from the earlier runs to the limit."""
        return (self.step_s - self.earlier_s) / (self.limit_s - self.earlier_s)


class RunRegression(JobsDetector[RunLevel]):
    kind = "run_regression"
    reads = (RankEvent,)
    state_of = RunLevel

    def observe(self, seen: Any) -> Results:
        if seen.event != EVENT:
            return ()
        step_s, steps = detail_number(seen, "step_s"), detail_number(seen, "steps")
        earlier = _numbers(seen.detail.get("earlier_s"))
        if step_s is None or not earlier or (steps or 0) < MIN_STEPS:
            return ()
        level = self.state.jobs.setdefault(seen.job_id, RunLevel())
        level.step_s, level.runs = step_s, len(earlier)
        level.earlier_s, effect = spread(earlier)
        level.limit_s = level.earlier_s * (1 + max(MIN_EFFECT, effect))
        level.phase = grown(seen.detail.get("phases_s"), seen.detail.get("earlier_phases_s"))
        level.nearest = max(level.nearest, level.excess)
        was_on, level.on = level.on, level.excess > (RELEASE if level.on else 1.0)
        found = self._found(seen, level) if level.on else None
        return changed(seen.job_id, seen.time, was_on, found)

    @staticmethod
    def _found(seen: RankEvent, level: RunLevel) -> Detected:
        which = "the run" if level.runs == 1 else f"the {level.runs} runs"
        grown_most = f", most of it in {level.phase}" if level.phase else ""
        text = (
            f"steps take {100 * (level.step_s / level.earlier_s - 1):.0f} % longer than in {which} "
            f"before: {level.step_s:.3g} s instead of {level.earlier_s:.3g} s{grown_most}"
        )
        return job_found(seen.job_id, seen.time, text, level.step_s, level.earlier_s)

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, level in self.state.jobs.items():
            text = f"a step takes {level.step_s:.3g} s, {level.earlier_s:.3g} s in {level.runs} "
            text += "earlier runs"
            value, usual = level.step_s, level.earlier_s
            yield job_status(name, level.on, text, value, level.limit_s, level, baseline=usual)


def spread(earlier: list[float]) -> tuple[float, float]:
    """Return the level of these runs, and the share by which a healthy run may exceed it."""
    level = median(earlier)
    if len(earlier) < KNOWN_RUNS:
        return level, UNKNOWN_SPREAD
    deviation = SIGMA_PER_MAD * median([abs(value - level) for value in earlier])
    return level, DEVIATIONS * deviation / level


def grown(now: object, earlier: object) -> str:
    """Return the phase whose mean grew most; empty if none grew."""
    if not isinstance(now, Mapping) or not isinstance(earlier, Mapping):
        return ""
    if max(len(now), len(earlier)) > MAX_PHASES:
        return ""
    growth = {
        str(name): seconds - (number(earlier.get(name)) or 0.0)
        for name, value in now.items()
        if (seconds := number(value)) is not None
    }
    most = max(growth, key=lambda name: growth[name], default="")
    return most if most and growth[most] > 0 else ""


def _numbers(value: object) -> list[float]:
    values = value[:MAX_RUNS] if isinstance(value, list | tuple) else []
    return [known for value in values if (known := number(value)) is not None and known > 0]
