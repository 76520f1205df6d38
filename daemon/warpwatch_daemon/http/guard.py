"""What every request passes: limits, basic auth, security headers, counting, errors in one line."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warpwatch_daemon.captures.alerts.webhook import PATH as WEBHOOK
from warpwatch_daemon.http.access import Access
from warpwatch_daemon.http.answers import ApiError
from warpwatch_daemon.http.basic_auth import BasicAuth
from warpwatch_daemon.http.limits import PeerLimit
from warpwatch_daemon.http.peer import peer_of

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 2**20
# A fault that every scrape meets is logged once in this time.
ERROR_LOG_INTERVAL_S = 60.0

# Open without a password: it says that the process lives, to a probe that has none.
LIVENESS = "/healthz"

# For every answer that does not say otherwise itself.
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


class Admission:
    """Which requests are let in; what they may see and do, a route decides."""

    def __init__(self, access: Access, limit: PeerLimit, basic_auth: BasicAuth | None) -> None:
        self._access = access
        self._limit = limit
        self._basic_auth = basic_auth

    async def admit(self, request: HTTPConnection) -> None:
        """Raises ApiError unless the request is let in."""
        wait_s = self._limit.wait_s(peer_of(request).name)
        if wait_s > 0:
            retry = {"Retry-After": str(math.ceil(wait_s))}
            # Alertmanager sends again only after a status of 500 and above.
            status = 503 if request.url.path == WEBHOOK else 429
            detail = "too many requests of this peer, or too costly ones"
            raise ApiError(status, "too_many_requests", detail, retry)
        length = request.headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length[:20]) > MAX_BODY_BYTES:
            raise too_large()
        password = await self._check_password(request)
        request.scope.setdefault("state", {})["caller"] = self._access.caller(
            request, has_password=password
        )

    def charge(self, request: HTTPConnection, cost_s: float) -> None:
        """What the request has cost the server's thread."""
        self._limit.charge(peer_of(request).name, cost_s)

    async def _check_password(self, request: HTTPConnection) -> bool:
        """Whether one was given. Raises ApiError where it is missing or wrong."""
        if self._basic_auth is None or request.url.path == LIVENESS:
            return False
        # The bearer token takes the place of the basic credentials: there is one such header.
        if peer_of(request).on_socket or self._access.has_token(request):
            return False
        await self._basic_auth.check(request.headers.get("authorization", ""))
        return True


class Guard:
    """ASGI middleware around all routes; ``count`` gets the status of every answer."""

    def __init__(self, app: ASGIApp, *, admission: Admission, count: Callable[[int], None]) -> None:
        self._app = app
        self._admission = admission
        self._count = count
        self._logged_at = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request, begun = HTTPConnection(scope), time.thread_time()

        def count(status: int) -> None:
            self._count(status)
            self._admission.charge(request, time.thread_time() - begun)

        answer = _WatchedAnswer(send, count)
        try:
            await self._admission.admit(request)
            await self._app(scope, receive, answer.send)
        except ApiError as error:
            await error.answer()(scope, receive, answer.send)
        except Exception:
            self._log(scope["path"])
            if not answer.begun:
                failure = ApiError(500, "internal", "the daemon failed; its log says how")
                await failure.answer()(scope, receive, answer.send)

    def _log(self, path: str) -> None:
        now = time.monotonic()
        if now - self._logged_at >= ERROR_LOG_INTERVAL_S:
            self._logged_at = now
            logger.error("a request for %.200r failed", path, exc_info=True)


def too_large() -> ApiError:
    return ApiError(413, "too_large", f"a body may have {MAX_BODY_BYTES} bytes at most")


class _WatchedAnswer:
    """Watches one answer go out."""

    def __init__(self, send: Send, count: Callable[[int], None]) -> None:
        self._send = send
        self._count = count
        self.begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.begun = True
            headers = MutableHeaders(scope=message)
            for name, value in SECURITY_HEADERS.items():
                headers.setdefault(name, value)
            self._count(message["status"])
        await self._send(message)
