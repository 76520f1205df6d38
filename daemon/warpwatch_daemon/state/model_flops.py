"""How much of what its GPUs could compute a job's model uses (MFU), of now.

method ``user``: the job says the FLOPs of a token or sample and its precision. ``shapes``: the
newest capture with shapes says how long a step's operators would take at the data sheet's peak.
``parameters``, where neither is known: six FLOPs a trained parameter and token (forward two,
backward four; Kaplan et al., 2001.08361), without attention. Absent where it cannot be known: a GPU
without a peak, no rate of steps; for ``parameters`` a model that is split over the ranks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    steps, window_s = trace.get("steps"), trace.get("window_s")
    return ratio * window_s / steps if ratio and window_s and steps else None


def ratios(
    ranks: Sequence[RankState], ideal_step_s: float | None, models: Mapping[str, str]
) -> dict[str, float]:
    """By method, of the ranks of one job that run. ``models``: names of GPUs by UUID."""
    running = [rank for rank in ranks if rank.steps_per_s]
    found = {"user": _mean(running, models, _said)}
    if running and ideal_step_s is not None:
        found["shapes"] = ideal_step_s * statistics.median(r.steps_per_s or 0.0 for r in running)
    if not any(found.values()):
        found = {"parameters": _mean(running, models, _by_parameters)}
    return {method: ratio for method, ratio in found.items() if ratio}


def _mean(
    ranks: Sequence[RankState],
    models: Mapping[str, str],
    flops_per_s: Callable[[RankState], float],
) -> float:
    """Over ranks of which all are known, else 0."""
    known = []
    for rank in ranks:
        peaks = peaks_of(models.get(rank.device or ""))
        peak = peaks.flops_per_s.get(rank.precision) if peaks else None
        known.append(flops_per_s(rank) / peak if peak else 0.0)
    return statistics.fmean(known) if known and all(known) else 0.0


def _said(rank: RankState) -> float:
    flops_per_s = rank.flops_per_token * (rank.tokens_per_s or 0.0)
    flops_per_s = flops_per_s or rank.flops_per_sample * (rank.samples_per_s or 0.0)
    # They read the same batch, and each computes its part of it.
    sharing = (rank.parallel.get(kind, (0, 1))[1] for kind in ("tensor", "pipeline", "context"))
    return flops_per_s / math.prod(sharing)


def _by_parameters(rank: RankState) -> float:
    splits = any(size > 1 for kind, (_, size) in rank.parallel.items() if kind != "data")
    return 0.0 if splits else 6.0 * rank.parameters * (rank.tokens_per_s or 0.0)
