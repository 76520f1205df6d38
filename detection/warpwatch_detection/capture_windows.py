"""Which jobs are being profiled: what happens meanwhile is the capture's doing, not a fault."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_telemetry.captures import CAPTURE_TIMEOUT_S
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import RankEvent

BEGIN_EVENTS = frozenset({"capture_armed", "capture_started"})
END_EVENTS = frozenset(
    {"capture_finished", "capture_failed", "capture_disarmed", "capture_late", "died"}
)


@dataclass(slots=True)
class CaptureWindows:
    """``since``: by job, the ranks that capture and when each began.

    A capture whose end is never reported ends after CAPTURE_TIMEOUT_S.
    """

    since: dict[JobId, dict[int, float]] = field(default_factory=dict)

    def observe(self, event: RankEvent) -> bool:
        """Whether this event ended a capture of its rank."""
        ranks = self.since.get(event.job_id)
        if event.event in BEGIN_EVENTS:
            self.since.setdefault(event.job_id, {})[event.rank] = event.time
        elif event.event in END_EVENTS and ranks and ranks.pop(event.rank, None) is not None:
            if not ranks:
                del self.since[event.job_id]
            return True
        return False

    def runs_until(self, job: JobId, now: float) -> float | None:
        """When the job's running captures are given up at the latest; None if none runs."""
        ranks = self.since.get(job)
        if not ranks:
            return None
        until = max(ranks.values()) + CAPTURE_TIMEOUT_S
        if until > now:
            return until
        self.forget(job)
        return None

    def forget(self, job: JobId) -> None:
        self.since.pop(job, None)
