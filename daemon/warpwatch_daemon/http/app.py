"""The routes."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from warpwatch_daemon.config.sections import HttpConfig
from warpwatch_daemon.http.access import Access
from warpwatch_daemon.http.alertmanager import AlertWebhook
from warpwatch_daemon.http.answers import ApiError, json_answer
from warpwatch_daemon.http.api import Api
from warpwatch_daemon.http.backend import Backend
from warpwatch_daemon.http.basic_auth import BasicAuth
from warpwatch_daemon.http.capture_files import CaptureFiles
from warpwatch_daemon.http.guard import Admission, Guard
from warpwatch_daemon.http.limits import PeerLimit
from warpwatch_daemon.http.metrics import MetricsPages
from warpwatch_daemon.http.openapi import openapi
from warpwatch_daemon.http.page.endpoint import PageEndpoint

_REASONS = {404: "not_found", 405: "method_not_allowed"}


def create_app(
    backend: Backend,
    config: HttpConfig,
    *,
    loopback: bool,
    basic_auth: BasicAuth | None = None,
    limit: PeerLimit | None = None,
) -> Starlette:
    """``loopback``: whether the daemon listens on a loopback address.

    Its ``state.pages`` are to be refreshed each second. Raises UsageError when the token file
    cannot be used.
    """
    access = Access(config, loopback=loopback)
    admission = Admission(access, limit or PeerLimit(), basic_auth)
    pages = MetricsPages(backend)
    guard = Middleware(Guard, admission=admission, count=backend.count_request)
    app = Starlette(
        routes=_routes(backend, access, pages, AlertWebhook(backend, access, config)),
        middleware=[guard],
        exception_handlers={HTTPException: _http_error},
    )
    # A redirect would be sent to whatever the Host header says.
    app.router.redirect_slashes = False
    app.state.pages = pages
    return app


def _routes(
    backend: Backend, access: Access, pages: MetricsPages, webhook: AlertWebhook
) -> list[Route]:
    api = Api(backend, access)

    async def describe(request: Request) -> Response:
        return json_answer(openapi(backend.state().version))

    return [
        Route("/", PageEndpoint(backend, access).show),
        Route("/metrics", pages.scrape),
        Route("/healthz", api.healthz),
        Route("/readyz", api.readyz),
        Route("/openapi.json", describe),
        Route("/api/v1/devices", api.devices),
        Route("/api/v1/jobs", api.jobs),
        Route("/api/v1/ranks", api.ranks),
        Route("/api/v1/anomalies", api.anomalies),
        Route("/api/v1/anomalies/{id}", api.anomaly),
        Route("/api/v1/detectors", api.detectors),
        Route("/api/v1/captures", api.captures, methods=["GET"]),
        Route("/api/v1/captures", api.request_capture, methods=["POST"]),
        Route("/api/v1/captures/{id}", api.capture),
        Route("/api/v1/captures/{id}/{file}", CaptureFiles(backend, access).send),
        Route("/api/v1/diagnoses", api.diagnoses),
        Route("/api/v1/alertmanager", webhook.receive, methods=["POST"]),
    ]


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses."""
    assert isinstance(error, HTTPException)
    reason = _REASONS.get(error.status_code, "refused")
    return ApiError(error.status_code, reason, str(error.detail), error.headers).answer()
