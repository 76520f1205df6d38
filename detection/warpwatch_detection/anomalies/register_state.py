"""What the register keeps of anomalies: everything here survives a restart of the daemon."""

from __future__ import annotations

from dataclasses import dataclass, field

from warpwatch_telemetry.anomalies import Anomaly, Severity

# What an anomaly is about: kind, job, device. Several ranks of one cause are one anomaly.
Key = tuple[str, str | None, str | None]
# The same with the rank that it named when it ended.
EndedKey = tuple[str, str | None, str | None, int | None]


@dataclass(slots=True)
class TrackedAnomaly:
    """An anomaly, and what is known of it besides.

    said: the detector's own sentence; effects: what the anomaly explains, by kind and job.
    named: the rank that was blamed last; shared: it went to and fro, so that no rank is to blame.
    held_until: when an event is over, if it does not happen again.
    """

    anomaly: Anomaly
    said: str
    effects: dict[str, str] = field(default_factory=dict)
    named: int | None = None
    shared: bool = False
    held_until: float = float("inf")


@dataclass(slots=True)
class Suppressed:
    """What a detector goes on finding while another anomaly explains it.

    again: how often it was found since its cause was over.
    time, severity, step, begin_step, value, baseline: of the newest finding.
    """

    kind: str
    job: str | None
    rank: int | None
    cause: str
    cause_id: str
    since: float
    summary: str
    again: int = 0
    device: str | None = None
    time: float = 0.0
    severity: Severity = "warning"
    step: int | None = None
    begin_step: int | None = None
    value: float | None = None
    baseline: float | None = None


@dataclass(slots=True)
class RegisterState:
    """``ended``: what may yet be continued, in the order of its end."""

    count: int = 0
    active: dict[Key, TrackedAnomaly] = field(default_factory=dict)
    ended: dict[EndedKey, TrackedAnomaly] = field(default_factory=dict)
    shadows: dict[Key, Suppressed] = field(default_factory=dict)
