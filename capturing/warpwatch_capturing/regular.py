"""Captures of healthy jobs: once per run, to compare later ones with, or every so often."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from warpwatch_capturing.participant import Board, Capturer
from warpwatch_capturing.triggers import is_refused
from warpwatch_telemetry.anomalies import DEVICE_KINDS, Anomaly
from warpwatch_telemetry.captures import REGULAR_TRIGGERS, Capture, CaptureRequest
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.state import RankState

logger = logging.getLogger(__name__)

INTERVAL_S = 1.0
# After a request: a busy rank, a full disk and quiet hours do not pass in seconds.
PAUSE_S = 600.0
# After a refusal that only another configuration, or another PyTorch, changes.
GIVEN_UP_S = 86400.0
_LASTING = frozenset({"refused_dry_run", "refused_disabled"})
STEPS = 5
# A baseline is tried so often if ranks end or evaluate in the middle of it.
MAX_TRIES = 2


class RegularJob(NamedTuple):
    """A job that runs. names: its names on all nodes. devices: the UUIDs of its GPUs."""

    id: JobId
    names: Collection[JobId]
    devices: Collection[str] = ()


class Rule(Protocol):
    """When a healthy job is captured, and of which ranks."""

    def jobs(self, now: float) -> Iterable[RegularJob]:
        """Return the jobs that the rule is for."""

    def due(self, job: RegularJob, taken: Sequence[Capture], now: float) -> CaptureRequest | None:
        """Return what to request now, if anything. ``taken``: the job's regular captures.

        Raises Refused if none is wanted for long.
        """


class RegularCaptures:
    """Applies a rule. The captures that were taken are known from the store."""

    def __init__(self, rule: Rule, capturer: Capturer) -> None:
        self._rule = rule
        self._capturer = capturer
        self._next_at = 0.0
        self._not_before: dict[JobId, float] = {}

    def advance(self, now: float, active: Sequence[Anomaly]) -> None:
        """Request what is due. ``now``: wall clock; ``active``: all active anomalies."""
        # If the clock was set back, do not wait until it catches up.
        if 0 < self._next_at - now <= INTERVAL_S:
            return
        self._next_at = now + INTERVAL_S
        jobs = {job.id: job for job in self._rule.jobs(now)}
        self._not_before = {job: at for job, at in self._not_before.items() if job in jobs}
        taken: dict[JobId, list[Capture]] = {}
        for capture in self._capturer.captures() if jobs else ():
            if capture.request.trigger in REGULAR_TRIGGERS:
                taken.setdefault(capture.request.job_id, []).append(capture)
        for job in jobs.values():
            of_job = [capture for name in set(job.names) for capture in taken.get(name, ())]
            # After a restart the last try is only in the store.
            is_tried = any(0 <= now - capture.time < PAUSE_S for capture in of_job)
            is_paused = is_tried or now < self._not_before.get(job.id, 0.0)
            if not is_paused and is_healthy(job, active):
                self._advance(job, of_job, now)

    def _advance(self, job: RegularJob, taken: Sequence[Capture], now: float) -> None:
        try:
            request = self._rule.due(job, taken, now)
            if request is not None:
                self._not_before[job.id] = now + PAUSE_S
                self._capturer.request(request)
        except Refused as refused:
            pause_s = GIVEN_UP_S if refused.reason in _LASTING else PAUSE_S
            self._not_before[job.id] = now + pause_s


def is_healthy(job: RegularJob, active: Iterable[Anomaly]) -> bool:
    """Return whether no anomaly is about the job or one of its GPUs."""
    return not any(
        one.job_id in job.names or (one.kind in DEVICE_KINDS and one.device in job.devices)
        for one in active
    )


class Baseline:
    """One capture of one rank of each run, once it has warmed up.

    On many nodes the daemon that has rank 0 takes it. None is taken if the newest one in the
    store has left its job slower, as PyTorch's profiler does in some versions
    (pytorch/pytorch#144455). Captures of jobs with anomalies do not show that, for their steps
    may have become slower by themselves.
    """

    def __init__(self, capturer: Capturer, board: Board) -> None:
        self._capturer = capturer
        self._board = board
        self._ranks: dict[JobId, list[RankState]] = {}

    def jobs(self, now: float) -> Iterable[RegularJob]:
        self._ranks = {}
        if not self._capturer.config.baseline.enabled:
            return
        for rank in self._board.ranks():
            if rank.status == "running":
                self._ranks.setdefault(rank.job_id, []).append(rank)
        for job, ranks in self._ranks.items():
            if self._is_warm(ranks, now):
                devices = {rank.device for rank in ranks if rank.device is not None}
                yield RegularJob(job, (job,), devices)

    def _is_warm(self, ranks: Sequence[RankState], now: float) -> bool:
        """Return whether the job has warmed up, and this daemon is to capture it."""
        config = self._capturer.config.baseline
        first = min(ranks, key=lambda rank: rank.rank)
        lived_s = now - min(rank.first_time for rank in ranks)
        return (
            (len(ranks) >= first.world_size or first.rank == 0)
            and first.steps_total >= config.after_steps
            and lived_s >= config.after_s
        )

    def due(self, job: RegularJob, taken: Sequence[Capture], now: float) -> CaptureRequest | None:
        tried = [one for one in taken if one.request.kind == "torch" and not is_refused(one)]
        is_taken = any(one.outcome in (None, "complete") for one in tried)
        if is_taken or len(tried) >= MAX_TRIES or self._capturer.is_busy(job.id):
            return None
        self._check_harm(job.id)
        rank = min(self._ranks[job.id], key=lambda rank: rank.rank)
        # Shapes are needed for the model's FLOPs, unless the job reports them.
        counts = rank.device is not None and not (rank.flops_per_token or rank.flops_per_sample)
        return CaptureRequest(
            kind="torch",
            trigger="baseline",
            ranks=(rank.rank,),
            steps=STEPS,
            options=("shapes",) if counts else (),
            reason="baseline: what the job does while it is well",
            **job.id.fields(),
        )

    def _check_harm(self, job: JobId) -> None:
        """Raise Refused if the newest priced baseline of any job left its job slower."""
        for capture in reversed(self._capturer.captures()):
            if capture.request.trigger == "baseline" and capture.residual is not None:
                if not capture.residual.slower:
                    return
                count = self._board.metrics.count_capture
                count("torch", "baseline", "refused_disabled", job.owner)
                detail = f"capture {capture.id} left its job slower"
                logger.info("no baseline of %s: %s", job.name, detail)
                raise Refused("refused_disabled", detail)
