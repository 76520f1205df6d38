"""The answers of the API: documents, which `/openapi.json` describes, and errors.

A record of the telemetry that the API shows unchanged has no model here: its dataclass is the
model. A number that is not finite is null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, Self, TypedDict

import msgspec
from starlette.responses import Response

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
from warpwatch_telemetry.catalogue import series_key, series_text
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.samples import Device, DeviceProcess, DeviceSample, SourceHealth
from warpwatch_telemetry.state import JobState, RankState


@dataclass(frozen=True, slots=True)
class Error:
    """``reason``: one of a closed set, for programs; ``detail``: a sentence for people."""

    reason: str
    detail: str


@dataclass(frozen=True, slots=True)
class ErrorAnswer:
    """The answer to a request that failed."""

    error: Error


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """``port``: the TCP port: a program at the socket compares a URL with it."""

    status: Literal["ok"] = "ok"
    version: str
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Readiness:
    """``missing``: the reasons why it is not ready, one line each."""

    ready: bool
    missing: Sequence[str]
    sources: Sequence[SourceHealth]


@dataclass(frozen=True, slots=True)
class SessionLink:
    """``path``: a path of the web page, with a key that is valid once and for ``seconds``.

    ``url``: the page's address on the daemon's machine, null while its port is taken.
    """

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

    def sample(self) -> DeviceSample:
        """Return the sample that this is the report of."""
        device = Device(**{field.name: getattr(self, field.name) for field in fields(Device)})
        values = {series_key(name): value for name, value in self.values.items()
                  if value is not None}  # fmt: skip
        processes = tuple(self.processes)
        return DeviceSample(device, self.time, values, self.up, self.reason, processes, self.source)


class DeviceList(TypedDict):
    devices: Sequence[DeviceReport]


class JobList(TypedDict):
    jobs: Sequence[JobState]


class RankList(TypedDict):
    ranks: Sequence[RankState]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyReport(Anomaly):
    """``sentence``: cause, rank or GPU, node, owner and job, and since when, for people.

    ``decision``: the decision on its trigger, null before there is one.
    """

    sentence: str
    scope: Scope
    decision: Decision | None

    @classmethod
    def of(cls, anomaly: Anomaly, node: str, decision: Decision | None, **more: Any) -> Self:
        """Return the report of an anomaly that ``node`` has found; ``more``: other fields."""
        more |= {"sentence": sentence(anomaly, node), "scope": scope_of(anomaly.kind)}
        return cls(**_fields(anomaly), decision=decision, **more)


class AnomalyList(TypedDict):
    anomalies: Sequence[AnomalyReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnomalyInContext(AnomalyReport):
    """``context``: the metrics of the minutes around it, null where nothing is known."""

    context: AnomalyContext | None


def _fields(found: Detected) -> dict[str, Any]:
    return {field.name: getattr(found, field.name) for field in fields(found)}


@dataclass(frozen=True, slots=True)
class DetectorReport:
    """How the detector of a kind sees each job, rank and device now."""

    kind: str
    readings: Sequence[DetectorStatus]


@dataclass(frozen=True, slots=True, kw_only=True)
class SuppressedReport(Detected):
    """A finding that another anomaly explains. ``again``: how often since its cause ended."""

    kind: str
    cause: str
    cause_id: str
    since: float
    again: int

    @classmethod
    def of(cls, one: Suppressed) -> SuppressedReport:
        """Return the report of a finding that another anomaly explains."""
        names = ("kind", "cause", "cause_id", "since", "again")
        return cls(**_fields(one.found), **{name: getattr(one, name) for name in names})


@dataclass(frozen=True, slots=True)
class DetectorList:
    """``suppressed``: findings that another anomaly explains."""

    detectors: Sequence[DetectorReport]
    suppressed: Sequence[SuppressedReport]


class CaptureList(TypedDict):
    captures: Sequence[Capture]


class RunList(TypedDict):
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


class DiagnosisList(TypedDict):
    diagnoses: Sequence[DiagnosisReport]


@dataclass(frozen=True, slots=True)
class AlertAnswers:
    """In the order of the alerts; ``unlisted`` counts the answers beyond the first 1,000."""

    alerts: Sequence[AlertAnswer]
    unlisted: int


class HttpError(Exception):
    """Ends a request with ``status`` and ``{"error": {"reason": …, "detail": …}}``."""

    def __init__(
        self, status: int, reason: str, detail: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.reason = reason
        self.detail = detail
        self.headers = dict(headers or {})

    def answer(self) -> Response:
        """Return the response."""
        error = Error(reason=self.reason, detail=self.detail)
        return json_answer(ErrorAnswer(error), self.status, self.headers)


def json_answer(
    document: object, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Return a dataclass as JSON; numbers that are not finite are null."""
    return Response(_text(document) + b"\n", status, dict(headers or {}), "application/json")


def _text(document: object) -> bytes:
    try:
        return msgspec.json.encode(document, enc_hook=_plain)
    except UnicodeEncodeError:
        # The name of a process or job may hold half a character (a lone surrogate), which only an
        # escape can write. json has escapes, but words of its own for numbers that are not finite.
        escaped = json.dumps(msgspec.to_builtins(document, enc_hook=_plain))
        return json.dumps(json.loads(escaped, parse_constant=lambda _: None)).encode()


def _plain(value: Any) -> object:
    """Return what msgspec encodes of a mapping or sequence that it does not know itself."""
    return dict(value) if isinstance(value, Mapping) else list(value)
