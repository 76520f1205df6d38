"""Steps that no detector has seen yet: those of a job that goes on as ever are shown together."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_telemetry.records import Step

# Steps that are shown at once.
MAX_STEPS = 1024


@dataclass(slots=True)
class GatheredSteps:
    """``steps``: in order, of one job. job: to whose steps more may be added; size: up to so many.

    calm: jobs whose steps were no news of late, so that nothing is missed while they wait.
    """

    steps: list[Step] = field(default_factory=list)
    job: str | None = None
    size: int = 0
    calm: set[str] = field(default_factory=set)

    def take(self) -> list[Step]:
        steps, self.steps = self.steps, []
        return steps

    def go_on(self, job: str, size: int) -> None:
        """With steps of a calm job, of which ``size`` make a whole one."""
        self.calm.add(job)
        self.job, self.size = job, min(size, MAX_STEPS)

    def unsettle(self, job: str) -> None:
        """Further steps of it are shown as they come."""
        self.calm.discard(job)
        self.job = None

    def unsettle_all(self) -> None:
        self.calm.clear()
        self.job = None
