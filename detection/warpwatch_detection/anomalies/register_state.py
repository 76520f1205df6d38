"""What the register keeps of anomalies: everything here survives a restart of the daemon."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from warpwatch_telemetry.anomalies import Anomaly, Found
from warpwatch_telemetry.jobs import JobId

# What an anomaly is about: kind, job, device. Several ranks of one cause are one anomaly.
Key = tuple[str, JobId | None, str | None]
# The same with the rank that it named when it ended.
EndedKey = tuple[str, JobId | None, str | None, int | None]


@dataclass(slots=True)
class TrackedAnomaly:
    """An anomaly, and what the register knows of it besides.

    summary: the detector's own sentence; effects: what the anomaly explains, by kind and job.
    named: the rank that was blamed last; shared: the blame went to and fro, so no rank has it.
    held_until: when an event is over, if it does not happen again.
    """

    anomaly: Anomaly
    summary: str
    effects: dict[str, str] = field(default_factory=dict)
    named: int | None = None
    shared: bool = False
    held_until: float = float("inf")

    def summarize(self) -> None:
        """Bring the anomaly's own summary and effects up to date."""
        effects = tuple(self.effects.values())
        summary = "; ".join((self.summary, *effects))
        self.anomaly = replace(self.anomaly, summary=summary, effects=effects)

    def found(self) -> Found:
        """What the detector found, without what became of it."""
        about = {name: getattr(self.anomaly, name) for name in Found.__dataclass_fields__}
        return Found(**about | {"summary": self.summary})

    def is_of_another_rank(self, found: Found) -> bool:
        """Whether a finding of the same kind and job names another rank."""
        if self.shared or None in (self.named, found.rank):
            return False
        return self.named != found.rank


@dataclass(slots=True)
class Suppressed:
    """What a detector goes on finding while another anomaly, the cause, explains it.

    since: when it was first found; found: its newest form. again: how often it was found
    after its cause was over.
    """

    kind: str
    found: Found
    cause: str
    cause_id: str
    since: float
    again: int = 0


@dataclass(slots=True)
class RegisterState:
    """``ended``: what may yet be continued, in the order of its end."""

    count: int = 0
    active: dict[Key, TrackedAnomaly] = field(default_factory=dict)
    ended: dict[EndedKey, TrackedAnomaly] = field(default_factory=dict)
    suppressed: dict[Key, Suppressed] = field(default_factory=dict)
