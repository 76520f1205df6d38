"""Makes the request for a capture from an anomaly and its kind's recipe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from warpwatch_capturing.board import LiveRank
from warpwatch_capturing.config import RecipeConfig
from warpwatch_telemetry.anomalies import DEVICE_KINDS, Anomaly
from warpwatch_telemetry.captures import AnomalySeen, Capture, CaptureRequest

# An older capture of the same kind was of another problem.
REPEAT_S = 86400.0
# Kinds whose value and baseline are times.
TIMED_KINDS = frozenset({"straggler", "step_regression", "comm_slow"})


def request_for(
    anomaly: Anomaly,
    recipe: RecipeConfig,
    local: Mapping[int, LiveRank] | None,
    active: Iterable[Anomaly],
    captures: Iterable[Capture],
) -> CaptureRequest:
    """Return the request for a job's anomaly.

    ``local``: the job's live ranks here, None for a fleet; ``active``: all active anomalies;
    ``captures``: those taken so far.
    """
    assert anomaly.job_id is not None
    # If the same comes back, the cheap capture was not enough.
    again = _is_repeated(anomaly, captures)
    options = {*recipe.options, *(("stacks",) if again else ())}
    return CaptureRequest(
        **anomaly.job_id.fields(),
        kind=recipe.kind,
        trigger="anomaly",
        ranks=ranks_of(anomaly, recipe, local, active),
        steps=recipe.steps,
        options=tuple(sorted(options)) if recipe.kind == "torch" else (),
        reason=anomaly.summary,
        anomaly_id=anomaly.id,
        anomaly_kind=anomaly.kind,
        anomaly_seen=AnomalySeen(anomaly.rank, anomaly.begin_step, _ratio(anomaly)),
    )


def _ratio(anomaly: Anomaly) -> float | None:
    if anomaly.kind not in TIMED_KINDS or not anomaly.value or not anomaly.baseline:
        return None
    return anomaly.value / anomaly.baseline


def ranks_of(
    anomaly: Anomaly,
    recipe: RecipeConfig,
    local: Mapping[int, LiveRank] | None,
    active: Iterable[Anomaly],
) -> tuple[int, ...] | None:
    """Return the ranks to capture; None for all that are here, or those that a fleet chooses."""
    culprit = anomaly.rank
    if recipe.ranks == "all" or culprit is None:
        return None
    if local is None:
        return (culprit,) if recipe.ranks == "culprit" else None
    peer = healthy_peer(anomaly, local, active) if recipe.ranks == "culprit_and_peer" else None
    return (culprit,) if peer is None else tuple(sorted((culprit, peer)))


def healthy_peer(
    anomaly: Anomaly, local: Mapping[int, LiveRank], active: Iterable[Anomaly]
) -> int | None:
    """Return the rank next to the culprit that runs here, without an anomaly of it or its GPU."""
    others = list(active)
    sick = {other.rank for other in others if other.job_id == anomaly.job_id}
    broken = {other.device for other in others if other.kind in DEVICE_KINDS}
    well = [
        number
        for number, rank in local.items()
        if number not in sick | {anomaly.rank}
        and rank.status == "running"
        and rank.device not in broken
    ]
    return min(well, key=lambda number: (abs(number - (anomaly.rank or 0)), number), default=None)


def _is_repeated(anomaly: Anomaly, captures: Iterable[Capture]) -> bool:
    """Return whether another anomaly of the kind was captured on this job, with some result."""
    return any(
        (capture.request.job_id, capture.request.anomaly_kind) == (anomaly.job_id, anomaly.kind)
        and capture.request.anomaly_id != anomaly.id
        and capture.outcome in ("complete", "partial")
        and capture.time >= anomaly.time - REPEAT_S
        for capture in captures
    )
