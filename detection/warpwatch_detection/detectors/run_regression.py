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
    Cleared,
    DetectorStatus,
    JobsDetector,
    Results,
    detail_number,
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
class RunLevel:
    """The newest comparison of a run. nearest: the largest part of the limit so far."""

    step_s: float
    earlier_s: float
    limit_s: float
    runs: int
    phase: str = ""
    nearest: float = 0.0
    on: bool = False

    @property
    def excess(self) -> float:
        """The part of the way from the earlier runs to the limit."""
        return (self.step_s - self.earlier_s) / (self.limit_s - self.earlier_s)


class RunRegression(JobsDetector[RunLevel]):
    kind = "run_regression"
    reads = (RankEvent,)
    job_type = RunLevel

    def observe(self, seen: Any) -> Results:
        if seen.event != EVENT:
            return ()
        step_s, steps = detail_number(seen, "step_s"), detail_number(seen, "steps")
        earlier = _numbers(seen.detail.get("earlier_s"))
        if step_s is None or not earlier or (steps or 0) < MIN_STEPS:
            return ()
        level = self._level(seen, step_s, earlier)
        was_on = level.on
        level.on = level.excess > (RELEASE if was_on else 1.0)
        if level.on:
            return (self._found(seen, level),)
        return (Cleared(seen.time, seen.job_id),) if was_on else ()

    def _level(self, seen: RankEvent, step_s: float, earlier: list[float]) -> RunLevel:
        """Return the job's level with these figures."""
        earlier_s, effect = spread(earlier)
        limit_s = earlier_s * (1 + max(MIN_EFFECT, effect))
        phase = grown(seen.detail.get("phases_s"), seen.detail.get("earlier_phases_s"))
        before = self.state.jobs.get(seen.job_id)
        level = RunLevel(step_s, earlier_s, limit_s, len(earlier), phase)
        if before is not None:
            level.on, level.nearest = before.on, before.nearest
        level.nearest = max(level.nearest, level.excess)
        self.state.jobs[seen.job_id] = level
        return level

    @staticmethod
    def _found(seen: RankEvent, level: RunLevel) -> Detected:
        which = "the run" if level.runs == 1 else f"the {level.runs} runs"
        grown_most = f", most of it in {level.phase}" if level.phase else ""
        return Detected(
            time=seen.time,
            severity="warning",
            **seen.job_id.fields(),
            value=level.step_s,
            baseline=level.earlier_s,
            summary=f"steps take {100 * (level.step_s / level.earlier_s - 1):.0f} % longer than in "
            f"{which} before: {level.step_s:.3g} s instead of {level.earlier_s:.3g} s{grown_most}",
        )

    def statuses(self) -> Iterable[DetectorStatus]:
        for name, level in self.state.jobs.items():
            yield DetectorStatus(
                "found" if level.on else "fine",
                f"a step takes {level.step_s:.3g} s, {level.earlier_s:.3g} s in {level.runs} "
                f"earlier runs",
                **name.fields(),
                value=level.step_s,
                baseline=level.earlier_s,
                limit=level.limit_s,
                nearest=level.nearest,
            )


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
