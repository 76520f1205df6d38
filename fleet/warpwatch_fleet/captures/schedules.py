"""Profiles that are taken of healthy jobs again and again: ``fleet.schedules``."""

from __future__ import annotations

import fnmatch
import logging
import time
from collections.abc import Callable, Iterator, Sequence

from warpwatch_fleet.captures.choosing import spread
from warpwatch_fleet.captures.requests import Captures
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.config import ScheduleConfig
from warpwatch_fleet.jobs import FleetJob
from warpwatch_telemetry.captures import CaptureRequest
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId

logger = logging.getLogger(__name__)

# After one that was refused or came to nothing: what agents say no to does not pass in seconds.
PAUSE_S = 600.0


class Schedules:
    """``advance`` now and then, in the loop that follows the agents.

    What has been taken is known from the captures that agents show, so a restart repeats none.
    """

    def __init__(
        self,
        schedules: Sequence[ScheduleConfig],
        cluster: Cluster,
        captures: Captures,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._schedules = schedules
        self._cluster = cluster
        self._captures = captures
        self._wall = wall
        self._asked_at: dict[JobId, float] = {}

    async def advance(self) -> None:
        if not self._schedules:
            return
        now = self._wall()
        with self._cluster.lock:
            due = list(self._due(now))
        for request in due:
            self._asked_at[request.job_id] = now
            try:
                await self._captures.request(request)
            except Refused as error:
                logger.info("no scheduled capture of %s: %s", request.job, error)

    def _due(self, now: float) -> Iterator[CaptureRequest]:
        jobs = self._cluster.jobs
        self._asked_at = {job: at for job, at in self._asked_at.items() if job in jobs}
        sick = {one.job_id for one in self._cluster.anomalies() if one.end_time is None}
        for job in jobs.values():
            schedule = self._schedule(job)
            if schedule is None or not job.live_nodes() or sick & job.names():
                continue
            since = max(job.begin_time, self._taken_at(job))
            paused = now - self._asked_at.get(job.id, float("-inf")) < PAUSE_S
            if now - since >= schedule.every and not paused:
                yield _request(job, schedule)

    def _schedule(self, job: FleetJob) -> ScheduleConfig | None:
        """The first that is for it."""
        name = job.id.base_name
        return next((one for one in self._schedules if fnmatch.fnmatchcase(name, one.job)), None)

    def _taken_at(self, job: FleetJob) -> float:
        return max(
            (
                one.time
                for one in self._captures.shown()
                if one.request.trigger == "schedule"
                and one.request.job_id in job.names()
                and one.outcome in (None, "complete", "partial")
            ),
            default=float("-inf"),
        )


def _request(job: FleetJob, schedule: ScheduleConfig) -> CaptureRequest:
    live = {rank: member.node for rank, member in job.members.items() if member.is_live}
    return CaptureRequest(
        **job.id.fields(),
        kind=schedule.kind,
        trigger="schedule",
        ranks=spread(live, schedule.ranks),
        steps=schedule.steps,
        reason=f"fleet.schedules: {schedule.job}",
    )
