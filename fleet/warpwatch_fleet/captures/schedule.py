"""Regular captures of healthy jobs: ``fleet.schedules``."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Sequence

from warpwatch_capturing.triggers.regular import RegularJob
from warpwatch_fleet.captures.remote_agents import spread
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.config import ScheduleConfig
from warpwatch_telemetry.captures import Capture, CaptureRequest
from warpwatch_telemetry.jobs import JobId


class Schedule:
    """A rule of ``triggers.regular``: every so often, some ranks of as many nodes as possible."""

    def __init__(self, schedules: Sequence[ScheduleConfig], cluster: Cluster) -> None:
        self._schedules = schedules
        self._cluster = cluster

    def jobs(self, now: float) -> Iterable[RegularJob]:
        """Return the jobs that run and have a schedule."""
        with self._cluster.lock:
            return [
                RegularJob(job.id, job.names())
                for job in self._cluster.jobs.values()
                if self._schedule(job.id) is not None and job.live_nodes()
            ]

    def _schedule(self, job: JobId) -> ScheduleConfig | None:
        """Return the first one that matches the job's name."""
        name = job.base_name
        return next((one for one in self._schedules if fnmatch.fnmatchcase(name, one.job)), None)

    def due(self, job: RegularJob, taken: Sequence[Capture], now: float) -> CaptureRequest | None:
        """Return a request, if the last capture that brought something is long ago."""
        schedule = self._schedule(job.id)
        with self._cluster.lock:
            found = self._cluster.jobs.get(job.id)
            live, began = (found.live_ranks(), found.begin_time) if found else ({}, now)
        own = [one for one in taken if one.request.trigger == "schedule"]
        times = [one.time for one in own if one.outcome in (None, "complete", "partial")]
        if schedule is None or not live or now - max([began, *times]) < schedule.every:
            return None
        return CaptureRequest(
            **job.id.fields(),
            kind=schedule.kind,
            trigger="schedule",
            ranks=spread(live, schedule.ranks),
            steps=schedule.steps,
            reason=f"fleet.schedules: {schedule.job}",
        )
