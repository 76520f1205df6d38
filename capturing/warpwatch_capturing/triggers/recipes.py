"""From an anomaly and its kind's recipe to the request for its capture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from warpwatch_capturing.board import LiveRank
from warpwatch_capturing.config import RecipeConfig
from warpwatch_telemetry.anomalies import DEVICE_KINDS, Anomaly
from warpwatch_telemetry.captures import AnomalySeen, Capture, CaptureRequest

# A capture of the same kind that long ago was of another problem.
REPEAT_S = 86400.0
# Whose value and baseline are times.
TIMED_KINDS = frozenset({"straggler", "step_regression", "comm_slow"})


def request_for(
    anomaly: Anomaly,
    recipe: RecipeConfig,
    local: Mapping[int, LiveRank],
    active: Iterable[Anomaly],
    captures: Iterable[Capture],
) -> CaptureRequest:
    """What to ask for. ``local``: the job's live ranks here; ``active``: all anomalies that are.

    ``captures``: those taken so far.
    """
    ranks = ranks_of(anomaly, recipe, local, active)
    return automatic(anomaly, recipe, ranks, again=_is_repeated(anomaly, captures))


def automatic(
    anomaly: Anomaly, recipe: RecipeConfig, ranks: tuple[int, ...] | None, again: bool = False
) -> CaptureRequest:
    """Of a job's anomaly. ``again``: the cheap capture was not enough."""
    assert anomaly.job_id is not None
    options = {*recipe.options, *(("stacks",) if again else ())}
    return CaptureRequest(
        **anomaly.job_id.fields(),
        kind=recipe.kind,
        trigger="anomaly",
        ranks=ranks,
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
    anomaly: Anomaly, recipe: RecipeConfig, local: Mapping[int, LiveRank], active: Iterable[Anomaly]
) -> tuple[int, ...] | None:
    """The ranks to capture; None means all that are here, also where none is named."""
    culprit = anomaly.rank
    if recipe.ranks == "all" or culprit is None:
        return None
    peer = healthy_peer(anomaly, local, active) if recipe.ranks == "culprit_and_peer" else None
    return (culprit,) if peer is None else tuple(sorted((culprit, peer)))


def healthy_peer(
    anomaly: Anomaly, local: Mapping[int, LiveRank], active: Iterable[Anomaly]
) -> int | None:
    """The rank next to the culprit that runs here and that no anomaly names, nor its device."""
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
    """Whether another anomaly of the kind was captured on this job before, with some result."""
    return any(
        (capture.request.job_id, capture.request.anomaly_kind) == (anomaly.job_id, anomaly.kind)
        and capture.request.anomaly_id != anomaly.id
        and capture.outcome in ("complete", "partial")
        and capture.time >= anomaly.time - REPEAT_S
        for capture in captures
    )
