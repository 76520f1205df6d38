"""Two runs side by side: how much longer a step takes, and which phase grew.

And which earlier runs of its job a run is compared with.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from warpwatch_detection.detectors.run_regression import MIN_STEPS
from warpwatch_telemetry.jobs import JobId, RunSummary

# Tokens a step that differ by less are the same.
SAME_WORK = 0.01


@dataclass(frozen=True, slots=True)
class RunPhaseChange:
    """Mean seconds a step, 0 where a run has no such phase."""

    phase: str
    before_s: float
    after_s: float

    @property
    def grown_s(self) -> float:
        return self.after_s - self.before_s


@dataclass(frozen=True, slots=True)
class RunComparison:
    """``after`` against ``before``. step_ratio: of the medians, None where one is not known.

    phases: those that changed most first. grown: the phase that grew most, None where none did.
    differs: what makes them runs of different kinds, a sentence each.
    """

    before: RunSummary
    after: RunSummary
    step_ratio: float | None
    phases: tuple[RunPhaseChange, ...]
    grown: str | None
    differs: tuple[str, ...]


def compare(before: RunSummary, after: RunSummary) -> RunComparison:
    ratio = None
    if before.step_p50_s and after.step_p50_s:
        ratio = after.step_p50_s / before.step_p50_s
    phases = phase_changes(before.phases_s, after.phases_s)
    grown = max(phases, key=lambda change: change.grown_s, default=None)
    name = grown.phase if grown is not None and grown.grown_s > 0 else None
    return RunComparison(before, after, ratio, phases, name, tuple(differences(before, after)))


def phase_changes(
    before: Mapping[str, float], after: Mapping[str, float]
) -> tuple[RunPhaseChange, ...]:
    names = sorted(before.keys() | after.keys())
    changes = [RunPhaseChange(name, before.get(name, 0.0), after.get(name, 0.0)) for name in names]
    return tuple(sorted(changes, key=lambda change: -abs(change.grown_s)))


def differences(before: RunSummary, after: RunSummary) -> Iterator[str]:
    """Why their steps are not expected to take the same."""
    for name in ("world_size", "gpu_model", "step_clock"):
        one, other = getattr(before, name), getattr(after, name)
        if one != other:
            yield f"{name}: {one} and {other}"
    for name in ("tokens_per_step", "samples_per_step"):
        one, other = getattr(before, name), getattr(after, name)
        if one is None and other is None:
            continue
        if one is None or other is None or abs(other / one - 1) > SAME_WORK:
            yield f"{name}: {_number(one)} and {_number(other)}"


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:g}"


# So many of the last good ones.
MAX_EARLIER = 5
REGRESSED = "run_regression"
# What so many runs in a row have been is how the job is now.
ACCEPTED_AFTER = 3


def earlier(run: RunSummary, runs: Iterable[RunSummary]) -> list[RunSummary]:
    """The last good ones of the same kind that ended, the newest first."""
    alike = [other for other in runs if _is_alike(other, run)]
    alike.sort(key=lambda other: -other.first_time)
    newest = alike[:ACCEPTED_AFTER]
    if len(newest) == ACCEPTED_AFTER and all(REGRESSED in other.anomalies for other in newest):
        return newest
    return [other for other in alike if REGRESSED not in other.anomalies][:MAX_EARLIER]


def compared(run: RunSummary, earlier_runs: Sequence[RunSummary]) -> dict[str, Any]:
    """The detail of the event ``compared``."""
    names = {name for other in earlier_runs for name in other.phases_s}
    return {
        "steps": _steps(run),
        "step_s": run.step_p50_s,
        "earlier_s": [other.step_p50_s for other in earlier_runs],
        "phases_s": dict(run.phases_s),
        "earlier_phases_s": {
            name: statistics.median(other.phases_s.get(name, 0.0) for other in earlier_runs)
            for name in sorted(names)
        },
    }


def has_enough(run: RunSummary) -> bool:
    return _steps(run) >= MIN_STEPS


def _steps(run: RunSummary) -> int:
    """Of a rank."""
    return run.judged_steps // max(1, len(run.ranks))


def name_of(job: JobId) -> tuple[str, str]:
    """Owner and name of the job that it is a run of: a second live one is ``name#<6 digits>``."""
    return job.owner, job.name.partition("#")[0]


def _is_alike(other: RunSummary, run: RunSummary) -> bool:
    """Another one of the same job and of the same kind, that ended."""
    is_other = name_of(other.job_id) == name_of(run.job_id) and other.job_id != run.job_id
    ended = other.end_time is not None and other.first_time < run.first_time
    return is_other and ended and has_enough(other) and not any(differences(other, run))
