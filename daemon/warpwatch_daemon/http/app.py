"""The application: all operations behind one guard."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache, partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from warpwatch_daemon.config.sections import HttpConfig
from warpwatch_daemon.http.access import Access
from warpwatch_daemon.http.agent import Agent, Watcher
from warpwatch_daemon.http.agent_api import AgentApi
from warpwatch_daemon.http.alertmanager import AlertWebhook
from warpwatch_daemon.http.answers import ApiError
from warpwatch_daemon.http.api import Api
from warpwatch_daemon.http.basic_auth import BasicAuth
from warpwatch_daemon.http.capture_files import CaptureFiles
from warpwatch_daemon.http.guard import Admission, Guard
from warpwatch_daemon.http.metrics import MetricsPages
from warpwatch_daemon.http.openapi import openapi
from warpwatch_daemon.http.page.endpoint import PageEndpoint
from warpwatch_daemon.http.records import RecordsEndpoint
from warpwatch_daemon.http.routes import agent_operations, operations

_REASONS = {404: "not_found", 405: "method_not_allowed"}


def create_app(
    watcher: Watcher,
    config: HttpConfig,
    *,
    loopback: bool,
    basic_auth: BasicAuth | None = None,
    page: PageEndpoint | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
) -> Starlette:
    """``loopback``: whether the daemon listens on a loopback address.

    Its ``state.pages`` are to be refreshed each second; its ``state.document`` is what
    `/openapi.json` answers. Raises UsageError when the token file cannot be used.
    """
    access = Access(config, loopback=loopback)
    admission = Admission(access, basic_auth, monotonic)
    pages = MetricsPages(watcher, monotonic)
    guard = Middleware(
        Guard, admission=admission, count=partial(_count, watcher), monotonic=monotonic
    )
    webhook = AlertWebhook(watcher, access)
    files, page = CaptureFiles(watcher, access), page or PageEndpoint(watcher)
    if isinstance(watcher, Agent):
        api = AgentApi(watcher, access)
        table = operations(api, files, pages, page, webhook)
        table += agent_operations(api, RecordsEndpoint(watcher, access, wall))
    else:
        table = operations(Api(watcher, access), files, pages, page, webhook)
    app = Starlette(
        routes=[Route(one.path, one.endpoint, methods=[one.method]) for one in table],
        middleware=[guard],
        exception_handlers={HTTPException: _http_error},
    )
    # A redirect would be sent to whatever the Host header says.
    app.router.redirect_slashes = False
    app.state.pages = pages
    # It takes 20 ms to make, and few ask for it.
    app.state.document = cache(lambda: openapi(watcher.state().version, table))
    return app


def _count(watcher: Watcher, status: int) -> None:
    watcher.metrics.counter("http_requests_total").labels(status).inc()


async def _http_error(request: Request, error: Exception) -> Response:
    """What the router itself refuses."""
    assert isinstance(error, HTTPException)
    reason = _REASONS.get(error.status_code, "refused")
    return ApiError(error.status_code, reason, str(error.detail), error.headers).answer()
