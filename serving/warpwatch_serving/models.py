"""The documents of the API, each written once: filters of lists, and answers.

`/openapi.json` describes them. A record of the telemetry that the API shows as it is has no model
of its own: its dataclass serves as one. A number that is not finite is null.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from pydantic import BaseModel, ConfigDict, Field, RootModel, field_validator

from warpwatch_detection.detector import DetectorStatus
from warpwatch_telemetry.alerts import AlertAnswer
from warpwatch_telemetry.anomalies import KINDS, Anomaly, AnomalyContext, Detected, Scope
from warpwatch_telemetry.captures import (
    CAPTURE_KINDS,
    Capture,
    Decision,
)
from warpwatch_telemetry.catalogue import series_text
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.samples import Device, DeviceProcess, DeviceSample, SourceHealth
from warpwatch_telemetry.state import JobState, RankState

AnomalyKind = Annotated[str, Field(json_schema_extra={"enum": list(KINDS)})]
CaptureKindName = Annotated[str, Field(json_schema_extra={"enum": list(CAPTURE_KINDS)})]


# --- filters: the parameters of lists, as they are named in the query ---


class Filters(BaseModel):
    """What is not given admits everything."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def admits(self, **values: object) -> bool:
        """Whether something with these values, by the filters' names, is asked for."""
        return all(getattr(self, name) in (None, value) for name, value in values.items())


class JobFilters(Filters):
    job: str | None = None
    owner: str | None = None


class PageFilters(JobFilters):
    """q: text in the name of a job, owner or node, or in an anomaly's kind; all: long lists whole.

    A form sends the fields that are left empty as empty strings: these admit everything, too.
    """

    node: str | None = None
    q: Annotated[str | None, Field(max_length=100)] = None
    all: bool | None = None
    show: str | None = None

    @field_validator("*", mode="before")
    @classmethod
    def _given(cls, value: object) -> object:
        return value or None

    def link(self, **changes: object) -> str:
        """Return the address of the page with these filters and ``changes``; None drops one."""
        kept = {**self.model_dump(exclude={"show"}), **changes}
        given = {name: "true" if value is True else value for name, value in kept.items() if value}
        return f"/?{urlencode(given)}" if given else "/"

    def only(self, **filters: object) -> str:
        """Return the address of the page with ``filters`` and no others."""
        return self.link(**{**dict.fromkeys(type(self).model_fields), **filters})


class RunFilters(JobFilters):
    run: str | None = None
    active: bool | None = None


class DetectorFilters(JobFilters):
    kind: AnomalyKind | None = None


class AnomalyFilters(DetectorFilters):
    active: bool | None = None


class DiagnosisFilters(JobFilters):
    kind: CaptureKindName | None = None


class CaptureFilters(DiagnosisFilters):
    active: bool | None = None


# --- answers ---


class Error(BaseModel):
    """``reason``: of a closed set, for programs; ``detail``: for people."""

    reason: str
    detail: str


class ErrorAnswer(BaseModel):
    error: Error


class Health(BaseModel):
    """``port``: of TCP, so that a program at the socket knows whether a URL is this daemon's."""

    status: Literal["ok"] = "ok"
    version: str
    port: int | None = None


class Readiness(BaseModel):
    """``missing``: what cannot be read, one line each."""

    ready: bool
    missing: tuple[str, ...]
    sources: tuple[SourceHealth, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceReport(Device):
    """A device and its newest values, by series: ``power_watts``, ``clock_hertz{domain=sm}``."""

    time: float
    values: Mapping[str, float | None]
    up: bool
    reason: str
    processes: tuple[DeviceProcess, ...]
    source: str

    @classmethod
    def of(cls, sample: DeviceSample) -> DeviceReport:
        return cls(
            **asdict(sample.device),
            time=sample.time,
            values={series_text(key): value for key, value in sample.values.items()},
            up=sample.up,
            reason=sample.reason,
            processes=sample.processes,
            source=sample.source,
        )


class DeviceList(BaseModel):
    devices: list[DeviceReport]


class JobList(BaseModel):
    jobs: list[JobState]


class RankList(BaseModel):
    ranks: list[RankState]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyReport(Anomaly):
    """``sentence``: cause, rank or GPU, node, owner and job, and since when, for people.
    ``decision``: what became of its trigger, null where none was taken yet."""

    sentence: str
    scope: Scope
    decision: Decision | None


class AnomalyList(BaseModel):
    anomalies: list[AnomalyReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyInContext(AnomalyReport):
    """``context``: the metrics of the minutes around it, null where nothing is known."""

    context: AnomalyContext | None


class OneAnomaly(RootModel[AnomalyInContext]):
    pass


class DetectorReport(BaseModel):
    """How the detector of a kind sees each job, rank and device now."""

    kind: str
    readings: list[DetectorStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuppressedReport(Detected):
    """What is found and explained by another anomaly. ``again``: since its cause was over."""

    kind: str
    cause: str
    cause_id: str
    since: float
    again: int


class DetectorList(BaseModel):
    """``suppressed``: what is found and explained by another anomaly."""

    detectors: list[DetectorReport]
    suppressed: list[SuppressedReport]


class CaptureList(BaseModel):
    captures: list[Capture]


class OneCapture(RootModel[Capture]):
    pass


class RunList(BaseModel):
    """Oldest first."""

    runs: list[RunSummary]


class DiagnosisReport(BaseModel):
    """The diagnosis of one capture: docs/diagnosis.md has its fields."""

    capture: str
    job: str
    owner: str
    time: float
    outcome: str | None
    diagnosis: Mapping[str, Any]


class DiagnosisList(BaseModel):
    diagnoses: list[DiagnosisReport]


class AlertAnswers(BaseModel):
    """In the order of the alerts; ``unlisted`` counts the answers beyond the first 1,000."""

    alerts: list[AlertAnswer]
    unlisted: int
