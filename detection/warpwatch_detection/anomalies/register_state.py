"""What the register keeps of anomalies: everything here survives a restart of the daemon."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from warpwatch_detection.anomalies.core_contention import NONE, Cores, Evidence
from warpwatch_detection.anomalies.worst import sentence, worse
from warpwatch_telemetry.anomalies import Anomaly, Detected, Worst
from warpwatch_telemetry.jobs import JobId

# What an anomaly is about: kind, job, device. Several ranks of one cause are one anomaly.
Key = tuple[str, JobId | None, str | None]
# The same with the rank that it named when it ended.
EndedKey = tuple[str, JobId | None, str | None, int | None]


@dataclass(slots=True)
class TrackedAnomaly:
    """An anomaly, and what the register knows of it besides.

    newest: in the detector's own words; worst: its worst moment; effects: what it explains, each
    at its worst, by kind and job.
    named: the rank that was blamed last; shared: the blame went to and fro, so no rank has it.
    evidence: the weightiest so far of what was seen beside it.
    held_until: when an event is over, if it does not happen again. end_step: of its job, when it
    was over.
    """

    anomaly: Anomaly
    newest: Detected
    worst: Worst
    effects: dict[str, Worst] = field(default_factory=dict)
    named: int | None = None
    shared: bool = False
    evidence: Evidence = NONE
    held_until: float = float("inf")
    end_step: int = -1

    def update(self, found: Detected) -> None:
        """The detector has found it again."""
        self.newest, self.worst = found, worse(self.anomaly.kind, self.worst, found)

    def summarize(self, is_new: bool = False) -> None:
        """Bring what it says of itself up to date. ``is_new``: it began, which is no recovery."""
        newest = self.newest
        said = newest.summary if is_new else sentence(self.anomaly.kind, newest, self.worst)
        self._say(said, newest)

    def end(self, time: float, explained_by: str | None, why: str) -> None:
        """``why``: it ended, if that needs to be said."""
        self.anomaly = replace(self.anomaly, end_time=time, explained_by=explained_by)
        self._say(self.worst.summary + why, self.worst)

    def _say(self, said: str, about: Detected | Worst) -> None:
        effects = tuple(effect.summary for effect in self.effects.values())
        evidence = (self.evidence.sentence,) if self.evidence.sentence else ()
        self.anomaly = replace(
            self.anomaly,
            value=about.value,
            baseline=about.baseline,
            summary="; ".join((said, *evidence, *effects)),
            effects=effects,
            evidence=evidence,
            worst=self.worst,
        )

    def found(self) -> Detected:
        """What the detector found last, with the rank and device that the anomaly has."""
        about = {name: getattr(self.anomaly, name) for name in Detected.__dataclass_fields__}
        return Detected(**about | {"summary": self.newest.summary})

    def is_of_another_rank(self, found: Detected) -> bool:
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
    found: Detected
    cause: str
    cause_id: str
    since: float
    again: int = 0


@dataclass(slots=True)
class RegisterState:
    """ended: what may yet be continued, in the order of its end. cores: why ranks had none."""

    count: int = 0
    active: dict[Key, TrackedAnomaly] = field(default_factory=dict)
    ended: dict[EndedKey, TrackedAnomaly] = field(default_factory=dict)
    suppressed: dict[Key, Suppressed] = field(default_factory=dict)
    cores: Cores = field(default_factory=dict)
