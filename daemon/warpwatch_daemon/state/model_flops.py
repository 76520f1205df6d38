"""How much of what its GPUs could compute a job's model uses (MFU), of now.

method ``user``: the job says the FLOPs of a token or sample and its precision. ``shapes``: the
newest capture with shapes says how long a step's operators would take at the data sheet's peak.
Absent where it cannot be known: no such capture, a GPU without a peak, no rate of steps.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from warpwatch_diagnosis.measures.roofline import peaks_of
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.state import RankState


def ideal_steps(captures: Iterable[Capture]) -> dict[JobId, float]:
    """By job, seconds of a step in which its GPUs would compute all the time at their peak."""
    found = {}
    for capture in captures:
        traces = (capture.diagnosis or {}).get("traces") or ()
        steps_s = [s for trace in traces if (s := _ideal_step(trace)) is not None]
        if steps_s:
            found[capture.request.job_id] = statistics.fmean(steps_s)
    return found


def _ideal_step(trace: Mapping[str, Any]) -> float | None:
    ratio = (trace.get("roofline") or {}).get("mfu_ratio")
    return ratio * trace["window_s"] / trace["steps"] if ratio and trace.get("steps") else None


def ratios(
    ranks: Sequence[RankState], ideal_step_s: float | None, models: Mapping[str, str]
) -> dict[str, float]:
    """By method, of the ranks of one job that run. ``models``: names of GPUs by UUID."""
    found = {}
    said = [_said(rank, models) for rank in ranks if rank.steps_per_s]
    if said and None not in said:
        found["user"] = statistics.fmean(ratio for ratio in said if ratio is not None)
    rates = [rank.steps_per_s for rank in ranks if rank.steps_per_s]
    if rates and ideal_step_s is not None:
        found["shapes"] = ideal_step_s * statistics.median(rates)
    return found


def _said(rank: RankState, models: Mapping[str, str]) -> float | None:
    peaks = peaks_of(models.get(rank.device or ""))
    peak = peaks.flops_per_s.get(rank.precision) if peaks else None
    flops_per_s = rank.flops_per_token * (rank.tokens_per_s or 0.0)
    flops_per_s = flops_per_s or rank.flops_per_sample * (rank.samples_per_s or 0.0)
    return flops_per_s / peak if peak and flops_per_s else None
