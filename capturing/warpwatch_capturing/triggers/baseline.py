"""One capture of a healthy job, once it has warmed up, to compare later ones with."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from warpwatch_capturing.board import Board
from warpwatch_capturing.config import BaselineConfig
from warpwatch_capturing.service import CaptureService
from warpwatch_telemetry.anomalies import DEVICE_KINDS, Anomaly
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.state import RankState

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0
# After a refusal: a busy rank, a full disk and quiet hours do not pass in seconds.
REFUSED_PAUSE_S = 600.0
# After one that only another configuration, or another PyTorch, would answer otherwise.
GIVEN_UP_S = 86400.0
STEPS = 5
# So often it is tried where ranks end or evaluate in the middle of it.
MAX_TRIES = 2


class BaselineCaptures:
    """Looks at the jobs that run. What was taken is known from the capture store.

    On many nodes the daemon that has rank 0 takes it. None is taken where the newest one in the
    store has left its job slower than it was, as PyTorch's profiler does in some versions
    (pytorch/pytorch#144455): what is well stays as it is. Captures of sick jobs say nothing of
    that, for their steps may have got slower by themselves.
    """

    def __init__(self, service: CaptureService, board: Board) -> None:
        self._service = service
        self._board = board
        self._look_at = 0.0
        self._not_before: dict[JobId, float] = {}

    def advance(self, now: float, active: Sequence[Anomaly]) -> None:
        """``now``: wall clock in seconds; ``active``: all anomalies that are."""
        config = self._service.policy.config.baseline
        # A clock that was set back is no reason to wait for it.
        if not config.enabled or 0 <= self._look_at - now <= LOOK_INTERVAL_S:
            return
        self._look_at = now + LOOK_INTERVAL_S
        jobs: dict[JobId, list[RankState]] = {}
        for rank in self._board.ranks():
            if rank.status == "running":
                jobs.setdefault(rank.job_id, []).append(rank)
        self._not_before = {job: at for job, at in self._not_before.items() if job in jobs}
        for job, ranks in jobs.items():
            if now >= self._not_before.get(job, 0.0) and _is_settled(ranks, config, now):
                self._consider(job, ranks, active, now)

    def _consider(
        self, job: JobId, ranks: Sequence[RankState], active: Sequence[Anomaly], now: float
    ) -> None:
        devices = {rank.device for rank in ranks if rank.device is not None}
        faults = {anomaly.device for anomaly in active if anomaly.kind in DEVICE_KINDS}
        if not faults.isdisjoint(devices) or any(anomaly.job_id == job for anomaly in active):
            return
        taken = self._service.register.baselines(job, now)
        if len(taken) >= MAX_TRIES or any(c.outcome in (None, "complete") for c in taken):
            self._not_before[job] = now + REFUSED_PAUSE_S
        elif not self._service.is_busy(job):
            self._ask(job, min(ranks, key=lambda rank: rank.rank), now)

    def _ask(self, job: JobId, rank: RankState, now: float) -> None:
        self._not_before[job] = now + REFUSED_PAUSE_S
        harmful = self._harmful()
        if harmful is not None:
            count = self._board.metrics.count_capture
            count("torch", "baseline", "refused_disabled", job.owner)
            logger.info("no baseline of %s: capture %s left its job slower", job.name, harmful.id)
            self._not_before[job] = now + GIVEN_UP_S
            return
        # What the job's model computes, unless it says so itself.
        counts = rank.device is not None and not (rank.flops_per_token or rank.flops_per_sample)
        reason = "baseline: what the job does while it is well"
        try:
            self._service.request(
                CaptureRequest(
                    kind="torch",
                    trigger="baseline",
                    ranks=(rank.rank,),
                    steps=STEPS,
                    options=("shapes",) if counts else (),
                    reason=reason,
                    **job.fields(),
                )
            )
        except Refused as refused:
            # Counted and logged where it was refused.
            if refused.reason in ("refused_dry_run", "refused_disabled"):
                self._not_before[job] = now + GIVEN_UP_S

    def _harmful(self) -> Capture | None:
        """The newest baseline of any job that was priced, if its job was slower afterwards."""
        for capture in reversed(self._service.register.all()):
            if capture.request.trigger == "baseline" and capture.residual is not None:
                return capture if capture.residual.slower else None
        return None


def _is_settled(ranks: Sequence[RankState], config: BaselineConfig, now: float) -> bool:
    """Whether the job is this daemon's to look at, and has warmed up."""
    first = min(ranks, key=lambda rank: rank.rank)
    seen_whole = len(ranks) >= first.world_size
    lived_s = now - min(rank.first_time for rank in ranks)
    return (
        (seen_whole or first.rank == 0)
        and first.steps_total >= config.after_steps
        and lived_s >= config.after_s
    )
