"""The documents that the API answers with; `/openapi.json` describes them.

A record of the telemetry that the API shows unchanged has no model here: its dataclass is the
model. A number that is not finite is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from warpwatch_detection.anomalies.tracked import Suppressed
from warpwatch_detection.detector import DetectorStatus
from warpwatch_telemetry.alerts import AlertAnswer
from warpwatch_telemetry.anomalies import (
    Anomaly,
    AnomalyContext,
    Detected,
    Scope,
    scope_of,
    sentence,
)
from warpwatch_telemetry.captures import Capture, Decision
from warpwatch_telemetry.catalogue import series_text
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.samples import Device, DeviceProcess, DeviceSample, SourceHealth
from warpwatch_telemetry.state import JobState, RankState


@dataclass(frozen=True, slots=True)
class Error:
    """``reason``: of a closed set, for programs; ``detail``: for people."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """The answer to a request that failed."""

    error: Error


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """``port``: of TCP, so that a program at the socket knows whether a URL is this daemon's."""

    status: Literal["ok"] = "ok"
    version: str
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Readiness:
    """``missing``: what cannot be read, one line each."""

    ready: bool
    missing: Sequence[str]
    sources: Sequence[SourceHealth]


@dataclass(frozen=True, slots=True)
class SessionLink:
    """``path``: of the web page, with a key that is valid once, for ``seconds``; ``url``: where the
    page is as seen from the daemon's machine, null while its port is taken."""

    path: str
    seconds: float
    url: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport(Device):
    """A device and its newest values, by series: ``power_watts``, ``clock_hertz{domain=sm}``."""

    time: float
    values: Mapping[str, float | None]
    up: bool
    reason: str
    processes: Sequence[DeviceProcess]
    source: str

    @classmethod
    def of(cls, sample: DeviceSample) -> DeviceReport:
        """Return the report of a sample."""
        return cls(
            **asdict(sample.device),
            time=sample.time,
            values={series_text(key): value for key, value in sample.values.items()},
            up=sample.up,
            reason=sample.reason,
            processes=sample.processes,
            source=sample.source,
        )


@dataclass(frozen=True, slots=True)
class DeviceList:
    """The devices."""

    devices: Sequence[DeviceReport]


@dataclass(frozen=True, slots=True)
class JobList:
    """The jobs."""

    jobs: Sequence[JobState]


@dataclass(frozen=True, slots=True)
class RankList:
    """The ranks."""

    ranks: Sequence[RankState]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyReport(Anomaly):
    """``sentence``: cause, rank or GPU, node, owner and job, and since when, for people.
    ``decision``: what became of its trigger, null where none was taken yet."""

    sentence: str
    scope: Scope
    decision: Decision | None

    @classmethod
    def of(cls, anomaly: Anomaly, node: str, decision: Decision | None) -> AnomalyReport:
        """Return the report of an anomaly that ``node`` has found."""
        return cls(**_about(anomaly, node), decision=decision)


@dataclass(frozen=True, slots=True)
class AnomalyList:
    """The anomalies."""

    anomalies: Sequence[AnomalyReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyInContext(AnomalyReport):
    """``context``: the metrics of the minutes around it, null where nothing is known."""

    context: AnomalyContext | None

    @classmethod
    def around(
        cls, anomaly: Anomaly, node: str, decision: Decision | None, context: AnomalyContext | None
    ) -> AnomalyInContext:
        """Return the report of an anomaly that ``node`` has found, and the minutes around it."""
        return cls(**_about(anomaly, node), decision=decision, context=context)


def _about(anomaly: Anomaly, node: str) -> dict[str, Any]:
    said = {"sentence": sentence(anomaly, node), "scope": scope_of(anomaly.kind)}
    return _fields(anomaly) | said


def _fields(found: Detected) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in fields(found)}


@dataclass(frozen=True, slots=True)
class DetectorReport:
    """How the detector of a kind sees each job, rank and device now."""

    kind: str
    readings: Sequence[DetectorStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuppressedReport(Detected):
    """What is found and explained by another anomaly. ``again``: since its cause was over."""

    kind: str
    cause: str
    cause_id: str
    since: float
    again: int

    @classmethod
    def of(cls, one: Suppressed) -> SuppressedReport:
        """Return the report of a finding that another anomaly explains."""
        return cls(
            **_fields(one.found),
            kind=one.kind,
            cause=one.cause,
            cause_id=one.cause_id,
            since=one.since,
            again=one.again,
        )


@dataclass(frozen=True, slots=True)
class DetectorList:
    """``suppressed``: what is found and explained by another anomaly."""

    detectors: Sequence[DetectorReport]
    suppressed: Sequence[SuppressedReport]


@dataclass(frozen=True, slots=True)
class CaptureList:
    """The captures."""

    captures: Sequence[Capture]


@dataclass(frozen=True, slots=True)
class RunList:
    """Oldest first."""

    runs: Sequence[RunSummary]


@dataclass(frozen=True, slots=True)
class DiagnosisReport:
    """The diagnosis of one capture: docs/diagnosis.md has its fields."""

    capture: str
    job: str
    owner: str
    time: float
    outcome: str | None
    diagnosis: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DiagnosisList:
    """The diagnoses."""

    diagnoses: Sequence[DiagnosisReport]


@dataclass(frozen=True, slots=True)
class AlertAnswers:
    """In the order of the alerts; ``unlisted`` counts the answers beyond the first 1,000."""

    alerts: Sequence[AlertAnswer]
    unlisted: int
