"""What of the state a caller sees: root everything, a user the devices and their own jobs."""

from __future__ import annotations

from dataclasses import replace

from warpwatch_telemetry.anomalies import DEVICE_KINDS, Anomaly
from warpwatch_telemetry.state import State


def visible(state: State, owner: str | None) -> State:
    """``owner``: of http.access.Caller."""
    if owner is None:
        return state
    anomalies = tuple(one for one in state.anomalies if may_see(one, owner))
    shown = {anomaly.id for anomaly in anomalies}
    return replace(
        state,
        ranks=tuple(rank for rank in state.ranks if rank.owner == owner),
        jobs=tuple(job for job in state.jobs if job.owner == owner),
        kineto_jobs=tuple(job for job in state.kineto_jobs if job.owner == owner),
        anomalies=anomalies,
        contexts={ident: one for ident, one in state.contexts.items() if ident in shown},
        captures=tuple(one for one in state.captures if one.request.owner == owner),
        sights=tuple(sight for sight in state.sights if sight.owner == owner),
        decisions=tuple(one for one in state.decisions if one.anomaly_id in shown),
    )


def may_see(anomaly: Anomaly, owner: str) -> bool:
    """Of a device, or of a job of this owner."""
    return anomaly.kind in DEVICE_KINDS or anomaly.owner == owner
