"""The operations of the API, and the application that is made of them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from warpwatch_serving import bodies, models
from warpwatch_serving.access import Access, Caller
from warpwatch_serving.alertmanager import AlertWebhook
from warpwatch_serving.answers import HttpError
from warpwatch_serving.api import JsonApi
from warpwatch_serving.backend import ApiBackend
from warpwatch_serving.basic_auth import BasicAuth
from warpwatch_serving.capture_files import CaptureFiles
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.guard import Admission, Guard
from warpwatch_serving.metrics import MetricsPages
from warpwatch_serving.openapi import Operation, openapi
from warpwatch_serving.page.endpoint import PageEndpoint
from warpwatch_serving.page.login import Login
from warpwatch_serving.sessions import Sessions
from warpwatch_telemetry.captures import Capture

Routes = Callable[[Any, Access], tuple[JsonApi, Sequence[Operation]]]

_REASONS = {404: "not_found", 405: "method_not_allowed"}


async def describe(request: Request) -> Response:
    """This document."""
    return JSONResponse(request.app.state.document())


def operations(
    api: JsonApi,
    files: CaptureFiles,
    metrics: MetricsPages,
    page: PageEndpoint,
    webhook: AlertWebhook,
    login: Login,
) -> list[Operation]:
    """Return the operations that agents and fleets have."""
    v1, of = "/api/v1", Operation
    octets, missing, refused = "application/octet-stream", (404,), (404, 409, 503)
    return [
        of("/", page.show, "text/html", bodies.PageFilters),
        of("/run", page.show_run, "text/html", bodies.RunFilters, errors=missing),
        of("/login", login.follow_link, "text/html", bodies.LoginFilters, is_open=True,
           errors=(401,)),
        of("/login", login.log_in, "text/html", method="POST", status=303, is_open=True,
           errors=(401,)),
        of("/logout", login.log_out, "text/html", method="POST", status=303),
        of("/metrics", metrics.scrape, "text/plain", is_open=True),
        of("/healthz", api.healthz, models.Health, is_open=True),
        of("/readyz", api.readyz, models.Readiness, is_open=True,
           also={503: models.Readiness}),
        of("/openapi.json", describe, "application/json"),
        of(f"{v1}/sessions", login.make_link, models.SessionLink, method="POST",
           status=201),
        of(f"{v1}/devices", api.devices, models.DeviceList, bodies.Filters),
        of(f"{v1}/jobs", api.jobs, models.JobList, bodies.JobFilters),
        of(f"{v1}/ranks", api.ranks, models.RankList, bodies.JobFilters),
        of(f"{v1}/anomalies", api.anomalies, models.AnomalyList, bodies.AnomalyFilters),
        of(f"{v1}/anomalies/{{id}}", api.anomaly, models.AnomalyInContext, bodies.Filters,
           errors=missing),
        of(f"{v1}/detectors", api.detectors, models.DetectorList, bodies.DetectorFilters),
        of(f"{v1}/captures", api.captures, models.CaptureList, bodies.CaptureFilters),
        of(f"{v1}/captures", api.request_capture, Capture, method="POST",
           body=bodies.CaptureBody, status=202, errors=refused),
        of(f"{v1}/captures/{{id}}", api.capture, Capture, errors=missing),
        of(f"{v1}/captures/{{id}}/{{file}}", files.send, octets, errors=(404, 503)),
        of(f"{v1}/alertmanager", webhook.receive, models.AlertAnswers, method="POST",
           body=bodies.AlertmanagerPayload, errors=(503,)),
        of(f"{v1}/runs", api.runs, models.RunList, bodies.RunFilters),
        of(f"{v1}/diagnoses", api.diagnoses, models.DiagnosisList, bodies.DiagnosisFilters),
    ]  # fmt: skip


def only_common_routes(backend: ApiBackend, access: Access) -> tuple[JsonApi, Sequence[Operation]]:
    """Return the API that agents and fleets share, without further routes."""
    return JsonApi(backend, access), ()


def create_app(
    backend: ApiBackend,
    config: HttpConfig,
    *,
    basic_auth: BasicAuth | None = None,
    page: PageEndpoint | None = None,
    routes: Routes = only_common_routes,
    monotonic: Callable[[], float] = time.monotonic,
) -> Starlette:
    """Return the application. ``routes`` makes the API and the routes of this process alone.

    Refresh its ``state.pages`` each second, and set ``state.port`` and ``state.url`` once it is
    listened on. ``state.document`` makes `/openapi.json`. Raises UsageError for a bad token file.
    """
    sessions: Sessions[Caller] = Sessions(f"{socket.gethostname()} {config.listen}", monotonic)
    access = Access(config, sessions)
    login = Login(access, sessions)
    pages = MetricsPages(backend, monotonic)
    guard = Middleware(
        Guard,
        admission=Admission(access, basic_auth),
        count=partial(_count, backend),
        refuse=login.refuse,
        monotonic=monotonic,
    )
    webhook = AlertWebhook(backend, access)
    files, page = CaptureFiles(backend, access), page or PageEndpoint(backend)
    api, more = routes(backend, access)
    table = [*operations(api, files, pages, page, webhook, login), *more]
    app = Starlette(
        routes=[Route(one.path, one.endpoint, methods=[one.method]) for one in table],
        middleware=[guard],
        exception_handlers={HTTPException: _http_error},
    )
    # A redirect would be sent to whatever the Host header says.
    app.router.redirect_slashes = False
    app.state.pages = pages
    app.state.port = app.state.url = None
    # It takes 20 ms to make, and is rarely requested.
    app.state.document = cache(lambda: openapi(backend.state().version, table))
    return app


def _count(backend: ApiBackend, status: int) -> None:
    backend.metrics.counter("http_requests_total").labels(status).inc()


async def _http_error(request: Request, error: Exception) -> Response:
    """Answer what the router itself refuses."""
    assert isinstance(error, HTTPException)
    reason = _REASONS.get(error.status_code, "refused")
    return HttpError(error.status_code, reason, str(error.detail), error.headers).answer()
