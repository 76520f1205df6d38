"""What each route takes and answers: the router and `/openapi.json` are made of this table."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from warpwatch_serving import bodies, models
from warpwatch_serving.alert_webhook import Webhook
from warpwatch_serving.alertmanager import AlertWebhook
from warpwatch_serving.api import Api
from warpwatch_serving.capture_files import CaptureFiles
from warpwatch_serving.metrics import MetricsPages
from warpwatch_serving.page.endpoint import PageEndpoint

Endpoint = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True)
class Operation:
    """One method of one path. The endpoint's docstring says what it is for.

    answer: the model of its document, or the media type of what is no JSON; also: documents that
    come with another status than ``status``; errors: statuses that come with an ErrorAnswer,
    beside those that every operation with filters, a body or a guard has.
    guarded: only for who may: docs/http.md, "Who may do what".
    """

    path: str
    endpoint: Endpoint
    answer: type[BaseModel] | str
    filters: type[models.Filters] | None = None
    method: str = "GET"
    body: type[BaseModel] | None = None
    guarded: bool = False
    status: int = 200
    also: Mapping[int, type[BaseModel]] = field(default_factory=dict)
    errors: tuple[int, ...] = ()


async def describe(request: Request) -> Response:
    """This document."""
    return JSONResponse(request.app.state.document())


def operations(
    api: Api,
    files: CaptureFiles,
    metrics: MetricsPages,
    page: PageEndpoint,
    webhook: AlertWebhook,
) -> list[Operation]:
    """What agents and fleets answer."""
    v1, of = "/api/v1", Operation
    octets, missing, refused = "application/octet-stream", (404,), (404, 409, 503)
    return [
        of("/", page.show, "text/html", models.PageFilters),
        of("/run", page.show_run, "text/html", models.RunFilters, errors=missing),
        of("/metrics", metrics.scrape, "text/plain"),
        of("/healthz", api.healthz, models.Health),
        of("/readyz", api.readyz, models.Readiness, also={503: models.Readiness}),
        of("/openapi.json", describe, "application/json"),
        of(f"{v1}/devices", api.devices, models.DeviceList, models.Filters),
        of(f"{v1}/jobs", api.jobs, models.JobList, models.JobFilters),
        of(f"{v1}/ranks", api.ranks, models.RankList, models.JobFilters),
        of(f"{v1}/anomalies", api.anomalies, models.AnomalyList, models.AnomalyFilters),
        of(f"{v1}/anomalies/{{id}}", api.anomaly, models.OneAnomaly, models.Filters,
           errors=missing),
        of(f"{v1}/detectors", api.detectors, models.DetectorList, models.DetectorFilters),
        of(f"{v1}/captures", api.captures, models.CaptureList, models.CaptureFilters),
        of(f"{v1}/captures", api.request_capture, models.OneCapture, method="POST", guarded=True,
           body=bodies.CaptureBody, status=202, errors=refused),
        of(f"{v1}/captures/{{id}}", api.capture, models.OneCapture, errors=missing),
        of(f"{v1}/captures/{{id}}/{{file}}", files.send, octets, guarded=True, errors=(404, 503)),
        of(f"{v1}/alertmanager", webhook.receive, models.AlertAnswers, method="POST", guarded=True,
           body=Webhook, errors=(503,)),
        of(f"{v1}/runs", api.runs, models.RunList, models.RunFilters),
        of(f"{v1}/diagnoses", api.diagnoses, models.DiagnosisList, models.DiagnosisFilters),
    ]  # fmt: skip
