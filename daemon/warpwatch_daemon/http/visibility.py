"""What of the state a caller sees: root everything, a user the devices and their own jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.state import RankState, State


def visible(state: State, owner: int | None) -> State:
    """``owner``: of http.access.Caller."""
    if owner is None:
        return state
    since = seen_since(state.ranks, owner)
    anomalies = tuple(one for one in state.anomalies if may_see(one, since))
    shown = {anomaly.id for anomaly in anomalies}
    return replace(
        state,
        ranks=tuple(rank for rank in state.ranks if rank.job in since),
        jobs=tuple(job for job in state.jobs if job.name in since),
        kineto_jobs=tuple(job for job in state.kineto_jobs if job.owner_uid == owner),
        anomalies=anomalies,
        contexts={ident: one for ident, one in state.contexts.items() if ident in shown},
        captures=tuple(one for one in state.captures if one.owner_uid == owner),
        decisions=tuple(one for one in state.decisions if one.anomaly_id in shown),
    )


def seen_since(ranks: Sequence[RankState], owner: int) -> dict[str, float]:
    """The jobs whose ranks are all this user's, and since when they are known."""
    foreign = {rank.job for rank in ranks if rank.owner_uid != owner}
    since: dict[str, float] = {}
    for rank in ranks:
        if rank.job not in foreign:
            since[rank.job] = min(rank.seen_time, since.get(rank.job, rank.seen_time))
    return since


def may_see(anomaly: Anomaly, since: Mapping[str, float]) -> bool:
    """Of a device, or of a job of ``since``: not of one of the same name before it."""
    return anomaly.job is None or (anomaly.job in since and anomaly.time >= since[anomaly.job])
