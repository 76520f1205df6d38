"""The application: all operations behind one guard."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from warpwatch_serving.access import Access
from warpwatch_serving.alertmanager import AlertWebhook
from warpwatch_serving.answers import ApiError
from warpwatch_serving.api import Api
from warpwatch_serving.basic_auth import BasicAuth
from warpwatch_serving.capture_files import CaptureFiles
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.guard import Admission, Guard
from warpwatch_serving.metrics import MetricsPages
from warpwatch_serving.openapi import openapi
from warpwatch_serving.page.endpoint import PageEndpoint
from warpwatch_serving.routes import Operation, operations
from warpwatch_serving.watcher import Watcher

_REASONS = {404: "not_found", 405: "method_not_allowed"}


Routes = Callable[[Any, Access], tuple[Api, Sequence[Operation]]]


def only_common_routes(watcher: Watcher, access: Access) -> tuple[Api, Sequence[Operation]]:
    """Return the API that agents and fleets share, without further routes."""
    return Api(watcher, access), ()


def create_app(
    watcher: Watcher,
    config: HttpConfig,
    *,
    loopback: bool,
    basic_auth: BasicAuth | None = None,
    page: PageEndpoint | None = None,
    routes: Routes = only_common_routes,
    monotonic: Callable[[], float] = time.monotonic,
) -> Starlette:
    """``loopback``: whether the daemon listens on a loopback address. ``routes``: the API and
    what this process answers beyond the common routes.

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
    api, more = routes(watcher, access)
    table = [*operations(api, files, pages, page, webhook), *more]
    app = Starlette(
        routes=[Route(one.path, one.endpoint, methods=[one.method]) for one in table],
        middleware=[guard],
        exception_handlers={HTTPException: _http_error},
    )
    # A redirect would be sent to whatever the Host header says.
    app.router.redirect_slashes = False
    app.state.pages = pages
    # Who listens sets it.
    app.state.port = None
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
