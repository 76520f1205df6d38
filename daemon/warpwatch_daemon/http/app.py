"""The application: all operations behind one guard."""

from __future__ import annotations

import functools

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from warpwatch_daemon.config.sections import HttpConfig
from warpwatch_daemon.http.access import Access
from warpwatch_daemon.http.agent import Agent
from warpwatch_daemon.http.alertmanager import AlertWebhook
from warpwatch_daemon.http.answers import ApiError
from warpwatch_daemon.http.api import Api
from warpwatch_daemon.http.basic_auth import BasicAuth
from warpwatch_daemon.http.capture_files import CaptureFiles
from warpwatch_daemon.http.guard import Admission, Guard
from warpwatch_daemon.http.limits import PeerLimit
from warpwatch_daemon.http.metrics import MetricsPages
from warpwatch_daemon.http.openapi import Schema, openapi
from warpwatch_daemon.http.page.endpoint import PageEndpoint
from warpwatch_daemon.http.routes import (
    Operation,
    alert_operation,
    capture_operations,
    daemon_operations,
    state_operations,
)

_REASONS = {404: "not_found", 405: "method_not_allowed"}


def create_app(
    agent: Agent,
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
    pages = MetricsPages(agent)
    guard = Middleware(Guard, admission=admission, count=agent.count_request)
    operations = _operations(agent, access, pages, AlertWebhook(agent, access, config))
    app = Starlette(
        routes=[Route(one.path, one.endpoint, methods=[one.method]) for one in operations],
        middleware=[guard],
        exception_handlers={HTTPException: _http_error},
    )
    # A redirect would be sent to whatever the Host header says.
    app.router.redirect_slashes = False
    app.state.pages = pages
    return app


def _operations(
    agent: Agent, access: Access, pages: MetricsPages, webhook: AlertWebhook
) -> list[Operation]:
    api = Api(agent, access)

    # It takes 20 ms, and seldom does someone ask.
    @functools.cache
    def document() -> Schema:
        return openapi(agent.state().version, operations)

    async def describe(request: Request) -> Response:
        return JSONResponse(document())

    operations = [
        *daemon_operations(api, pages, PageEndpoint(agent, access)),
        *state_operations(api),
        *capture_operations(api, CaptureFiles(agent, access)),
        alert_operation(webhook),
        Operation("/openapi.json", describe, "This document", "application/json"),
    ]
    return operations


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses."""
    assert isinstance(error, HTTPException)
    reason = _REASONS.get(error.status_code, "refused")
    return ApiError(error.status_code, reason, str(error.detail), error.headers).answer()
