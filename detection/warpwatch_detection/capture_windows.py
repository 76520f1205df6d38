"""Which jobs are being profiled: what happens meanwhile is the capture's doing, not a fault."""

from __future__ import annotations

from warpwatch_telemetry.records import RankEvent

BEGIN_EVENTS = frozenset({"capture_armed", "capture_started"})
END_EVENTS = frozenset(
    {"capture_finished", "capture_failed", "capture_disarmed", "capture_late", "died"}
)


class CaptureWindows:
    """Per job the ranks that capture; one whose end is never told ends after ``timeout_s``.

    ``since``: the memory of a detector that saves it with its own, job -> rank -> time of begin.
    """

    def __init__(self, timeout_s: float, since: dict[str, dict[int, float]] | None = None) -> None:
        self._timeout_s = timeout_s
        self.since: dict[str, dict[int, float]] = {} if since is None else since

    def observe(self, event: RankEvent) -> bool:
        """Whether this event ended a capture of its rank."""
        ranks = self.since.get(event.job)
        if event.event in BEGIN_EVENTS:
            self.since.setdefault(event.job, {})[event.rank] = event.time
        elif event.event in END_EVENTS and ranks and ranks.pop(event.rank, None) is not None:
            if not ranks:
                del self.since[event.job]
            return True
        return False

    def runs_until(self, job: str, now: float) -> float | None:
        """When the job's running captures are given up at the latest; None if none runs."""
        ranks = self.since.get(job)
        if not ranks:
            return None
        until = max(ranks.values()) + self._timeout_s
        if until > now:
            return until
        self.forget(job)
        return None

    def forget(self, job: str) -> None:
        self.since.pop(job, None)
