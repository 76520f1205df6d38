"""Anomalies as the register tracks them: their worst moment, their effects, and their summary."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from warpwatch_detection.anomalies.core_contention import NONE, Evidence
from warpwatch_telemetry.anomalies import EVENT_KINDS, Anomaly, Detected, Worst
from warpwatch_telemetry.jobs import JobId

# The subject of an anomaly: kind, job, device. Several ranks with one cause are one anomaly.
Key = tuple[str, JobId | None, str | None]
# The same with the rank that it named when it ended.
EndedKey = tuple[str, JobId | None, str | None, int | None]


@dataclass(slots=True)
class TrackedAnomaly:
    """An anomaly with the register's own facts about it.

    newest: the newest finding of the detector. worst: the worst moment. effects: the worst moments
    of the findings that it explains, by kind and job. named: the rank that was named last. shared:
    whether several ranks were named in turn, so that none is. evidence: the weightiest so far.
    held_until: when an event is over if it does not happen again. end_step: the newest step of its
    job when it ended.
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
        self.newest, self.worst = found, worse(self.anomaly.kind, self.worst, found)

    def summarize(self, is_new: bool = False) -> None:
        """Update the summary. is_new: whether it started now, so that it does not recover."""
        newest = self.newest
        text = newest.summary if is_new else sentence(self.anomaly.kind, newest, self.worst)
        self._describe(text, newest)

    def end(self, time: float, explained_by: str | None, why: str) -> None:
        """Close it; the summary ends with ``why``."""
        self.anomaly = replace(self.anomaly, end_time=time, explained_by=explained_by)
        self._describe(self.worst.summary + why, self.worst)

    def _describe(self, text: str, about: Detected | Worst) -> None:
        effects = tuple(effect.summary for effect in self.effects.values())
        evidence = (self.evidence.sentence,) if self.evidence.sentence else ()
        self.anomaly = replace(
            self.anomaly,
            value=about.value,
            baseline=about.baseline,
            summary="; ".join((text, *evidence, *effects)),
            effects=effects,
            evidence=evidence,
            worst=self.worst,
        )

    def found(self) -> Detected:
        """Return the newest finding, with the anomaly's rank and device."""
        about = {name: getattr(self.anomaly, name) for name in Detected.__dataclass_fields__}
        return Detected(**about | {"summary": self.newest.summary})

    def is_of_another_rank(self, found: Detected) -> bool:
        """Return whether a finding of the same kind and job names another rank."""
        if self.shared or None in (self.named, found.rank):
            return False
        return self.named != found.rank


@dataclass(slots=True)
class Suppressed:
    """A finding that another active anomaly, the cause, explains.

    found: its newest form. since: when it was first found. again: how often it was found after its
    cause was over.
    """

    kind: str
    found: Detected
    cause: str
    cause_id: str
    since: float
    again: int = 0


# --- which of two findings of a kind is worse ---

# An anomaly recovers below this part of its worst, which noise does not reach.
RECOVERING_SHARE = 0.5

# The rank of the quantity, which is higher for a graver one, and its badness: more is worse.
Badness = tuple[int, float]
_Badness = Callable[[float, float | None], Badness]


def _above(value: float, baseline: float | None) -> Badness:
    return 0, value - (baseline or 0.0)


def _longer(value: float, baseline: float | None) -> Badness:
    return 0, value / baseline - 1 if baseline else value


# For all other kinds the value is the badness.
_BADNESS: Mapping[str, _Badness] = {
    "step_regression": _longer,
    "step_drift": _longer,
    "straggler": _longer,
    "step_spikes": _above,
    "comm_slow": _above,
    "data_stall": _above,
    "network_link_down": lambda up, _: (0, 1 - up),
    "clock_drop": lambda value, usual: (0, 1 - value / usual if usual else -value),
    # Retries before fullness, a slow link before packets sent again, links that are down before
    # errors and these before a rate.
    "memory_pressure": lambda value, limit: (int(limit == 0), value),
    "pcie_degraded": lambda value, best: (1, 1 - value / best) if best else (0, value),
    "nvlink_error": lambda value, links: (0 if links is None else 2 if links else 1, value),
}


def _badness(kind: str, found: Detected | Worst) -> Badness:
    """Return the badness of a finding. The newest event is the worst, as is one without a value."""
    if kind in EVENT_KINDS or found.value is None:
        return 0, math.inf
    badness = _BADNESS.get(kind)
    return badness(found.value, found.baseline) if badness else (0, found.value)


def worse(kind: str, before: Worst | None, found: Detected, summary: str = "") -> Worst:
    """Return the worse of two findings, the newer if they are equal.

    summary: a text that replaces the detector's own.
    """
    if before is not None and _badness(kind, found) < _badness(kind, before):
        return before
    text = summary or found.summary
    return Worst(found.time, text, found.step, found.value, found.baseline)


def recovers(kind: str, found: Detected, worst: Detected | Worst) -> bool:
    """Return whether a finding is far below the worst."""
    now, then = _badness(kind, found), _badness(kind, worst)
    return now < then and (now[0] != then[0] or now[1] <= RECOVERING_SHARE * then[1])


def sentence(kind: str, found: Detected, worst: Worst) -> str:
    """Return the summary of an active anomaly: the newest finding, or that it recovers."""
    if not recovers(kind, found, worst):
        return found.summary
    at = "" if worst.step is None else f" (step {worst.step})"
    return f"recovering: now {_short(kind, found)}; at its worst{at} {worst.summary}"


def _short(kind: str, found: Detected) -> str:
    """Return the present state in a few words, or the whole summary."""
    value, baseline = found.value, found.baseline
    if value is not None and baseline and _BADNESS.get(kind) is _longer:
        return f"{100 * max(0.0, value / baseline - 1):.0f} % longer"
    if value is not None and kind in ("data_stall", "gc_pause", "step_spikes"):
        of = "steps" if kind == "step_spikes" else "time"
        return f"{100 * value:.0f} % of the {of}"
    return found.summary
