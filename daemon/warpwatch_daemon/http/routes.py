"""What each route takes and answers: the router and `/openapi.json` are made of these tables."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from warpwatch_daemon.captures.alerts.webhook import Webhook
from warpwatch_daemon.http import models
from warpwatch_daemon.http.alertmanager import AlertWebhook
from warpwatch_daemon.http.api import Api
from warpwatch_daemon.http.capture_files import CaptureFiles
from warpwatch_daemon.http.metrics import MetricsPages
from warpwatch_daemon.http.page.endpoint import PageEndpoint

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path.

    answer: the model of its document, or the media type of what is no JSON; also: of answers with
    another status than ``status``; errors: statuses that come with an ErrorAnswer, beside those
    that every operation with filters, a body or a guard has.
    guarded: it takes the token, or a request of this very machine.
    """

    path: str
    endpoint: Endpoint
    summary: str
    answer: type[BaseModel] | str
    filters: type[models.Filters] | None = None
    method: str = "GET"
    body: type[BaseModel] | None = None
    guarded: bool = False
    status: int = 200
    also: Mapping[int, type[BaseModel]] = field(default_factory=dict)
    errors: tuple[int, ...] = ()


def daemon_operations(api: Api, metrics: MetricsPages, page: PageEndpoint) -> list[Operation]:
    """How the daemon does, and its state for people and for Prometheus."""
    return [
        Operation("/", page.show, "The web page", "text/html"),
        Operation(
            "/metrics",
            metrics.scrape,
            "Prometheus text format or OpenMetrics, by Accept",
            "text/plain",
        ),
        Operation("/healthz", api.healthz, "Whether the process lives", models.Health),
        Operation(
            "/readyz",
            api.readyz,
            "Whether every source can be read",
            models.Readiness,
            also={503: models.Readiness},
        ),
    ]


def state_operations(api: Api) -> list[Operation]:
    """What is known of the node."""
    return [
        Operation(
            "/api/v1/devices",
            api.devices,
            "Devices with their newest values",
            models.DeviceList,
            models.Filters,
        ),
        Operation("/api/v1/jobs", api.jobs, "Jobs", models.JobList, models.JobFilters),
        Operation(
            "/api/v1/ranks",
            api.ranks,
            "Ranks with their newest steps",
            models.RankList,
            models.JobFilters,
        ),
        Operation(
            "/api/v1/anomalies",
            api.anomalies,
            "Anomalies",
            models.AnomalyList,
            models.AnomalyFilters,
        ),
        Operation(
            "/api/v1/anomalies/{id}",
            api.anomaly,
            "One anomaly, with the metrics of the minutes around it",
            models.AnomalyInContext,
            models.Filters,
            errors=(404,),
        ),
        Operation(
            "/api/v1/detectors",
            api.detectors,
            "How the detectors see what they judge, and why",
            models.DetectorList,
            models.DetectorFilters,
        ),
    ]


def capture_operations(api: Api, files: CaptureFiles) -> list[Operation]:
    """Captures: asking for one, and what they brought."""
    return [
        Operation(
            "/api/v1/captures", api.captures, "Captures", models.CaptureList, models.CaptureFilters
        ),
        Operation(
            "/api/v1/captures",
            api.request_capture,
            "Ask for a capture",
            models.OneCapture,
            method="POST",
            body=models.CaptureBody,
            guarded=True,
            status=202,
            errors=(404, 409, 503),
        ),
        Operation(
            "/api/v1/captures/{id}",
            api.capture,
            "One capture",
            models.OneCapture,
            errors=(404,),
        ),
        Operation(
            "/api/v1/captures/{id}/{file}",
            files.send,
            "A file of a capture",
            "application/octet-stream",
            guarded=True,
            errors=(404,),
        ),
        Operation(
            "/api/v1/diagnoses",
            api.diagnoses,
            "What the captures' traces say",
            models.DiagnosisList,
            models.DiagnosisFilters,
        ),
    ]


def alert_operation(webhook: AlertWebhook) -> Operation:
    return Operation(
        "/api/v1/alertmanager",
        webhook.receive,
        "Alerts that fire ask for captures",
        models.AlertAnswers,
        method="POST",
        body=Webhook,
        guarded=True,
        also={503: models.AlertAnswers},
    )
