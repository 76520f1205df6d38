"""What every request passes: limits, basic auth, security headers, counting, errors in one line."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warpwatch_serving.access import Access
from warpwatch_serving.alert_webhook import PATH as WEBHOOK
from warpwatch_serving.answers import ApiError
from warpwatch_serving.basic_auth import BasicAuth
from warpwatch_serving.peer import peer_of

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

    def __init__(
        self,
        access: Access,
        basic_auth: BasicAuth | None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._access = access
        self._limit = PeerLimit(monotonic)
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

    def __init__(
        self,
        app: ASGIApp,
        *,
        admission: Admission,
        count: Callable[[int], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._monotonic = monotonic
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
        now = self._monotonic()
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


# Far above what Prometheus, probes and some open pages send together from one address.
RATE_PER_S = 50.0
BURST = 200.0
# Of the server's thread, in seconds: a page costs some hundredths, a scrape some thousandths.
COST_PER_S = 0.1
COST_BURST_S = 2.0
MAX_PEERS = 1024


@dataclass(slots=True)
class _Bucket:
    requests: float
    cost_s: float
    since: float


class PeerLimit:
    """RATE_PER_S requests a second, BURST at once, and what they cost in the same way.

    The longest silent peer is forgotten.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def wait_s(self, peer: str) -> float:
        """0 when the request is admitted, else the seconds until the next one would be."""
        bucket = self._refilled(peer)
        wait_s = max(
            (1 - bucket.requests) / RATE_PER_S if bucket.requests < 1 else 0.0,
            -bucket.cost_s / COST_PER_S,
            0.0,
        )
        if wait_s == 0:
            bucket.requests -= 1
        return wait_s

    def charge(self, peer: str, cost_s: float) -> None:
        """A request of the peer that was admitted has cost this much."""
        bucket = self._buckets.get(peer)
        if bucket is not None:
            bucket.cost_s -= cost_s

    def _refilled(self, peer: str) -> _Bucket:
        now = self._monotonic()
        bucket = self._buckets.pop(peer, None) or _Bucket(BURST, COST_BURST_S, now)
        passed_s = now - bucket.since
        bucket.requests = min(BURST, bucket.requests + passed_s * RATE_PER_S)
        bucket.cost_s = min(COST_BURST_S, bucket.cost_s + passed_s * COST_PER_S)
        bucket.since = now
        self._buckets[peer] = bucket
        if len(self._buckets) > MAX_PEERS:
            self._buckets.popitem(last=False)
        return bucket
