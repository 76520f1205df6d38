"""Which earlier runs of a job a run is compared with."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from warpwatch_daemon.history.runs.comparison import differences
from warpwatch_detection.detectors.run_regression import MIN_STEPS
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.runs import RunSummary

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
