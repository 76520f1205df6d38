"""The ASGI middleware around all routes: limits, passwords, security headers, counts, errors."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warpwatch_serving.access import Access
from warpwatch_serving.answers import HttpError
from warpwatch_serving.basic_auth import BasicAuth
from warpwatch_serving.bodies import MAX_BODY_BYTES, too_large
from warpwatch_serving.connection import ClientGone
from warpwatch_serving.peer import peer_of

logger = logging.getLogger(__name__)

# A fault that every scrape meets is logged once in this time.
ERROR_LOG_INTERVAL_S = 60.0
# Alertmanager sends a notification again only after a status of 500 and above.
WEBHOOK = "/api/v1/alertmanager"
# Open without a password: it says that the process lives, to a probe that has none.
LIVENESS = "/healthz"
# Far above what Prometheus, probes and some open pages send together from one address.
RATE_PER_S = 50.0
BURST = 200.0
MAX_PEERS = 1024
# A peer above its rate waits for the refusal, so that it cannot ask again at once.
REFUSAL_PAUSE_S = 1.0

# An answer may bring its own of each.
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


class Admission:
    """Decides which requests reach a route; the routes decide what they may see and do."""

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
        """Leave the caller's rights in the request's state. Raises HttpError to refuse it."""
        wait_s = self._limit.wait_s(peer_of(request).name)
        if wait_s > 0:
            await asyncio.sleep(min(wait_s, REFUSAL_PAUSE_S))
            retry = {"Retry-After": str(math.ceil(wait_s))}
            status = 503 if request.url.path == WEBHOOK else 429
            raise HttpError(status, "too_many_requests", "too many requests of this peer", retry)
        length = request.headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length[:20]) > MAX_BODY_BYTES:
            raise too_large()
        password = await self._check_password(request)
        state = request.scope.setdefault("state", {})
        state["caller"] = self._access.caller(request, has_password=password)

    async def _check_password(self, request: HTTPConnection) -> bool:
        """Return whether the right one was given. Raises HttpError if it is missing or wrong."""
        if self._basic_auth is None or request.url.path == LIVENESS:
            return False
        if self._access.is_known(request):
            return False
        await self._basic_auth.check(request.headers.get("authorization", ""))
        return True


class Guard:
    """The middleware.

    count: receives the status of every answer. refuse: makes the answer to a request that was
    refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        admission: Admission,
        count: Callable[[int], None],
        refuse: Callable[[HTTPConnection, HttpError], Response],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._admission = admission
        self._count = count
        self._refuse = refuse
        self._monotonic = monotonic
        self._logged_at = -math.inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = HTTPConnection(scope)
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                self._count(message["status"])
            await send(message)

        try:
            await self._admission.admit(request)
            await self._app(scope, receive, watched)
        except HttpError as error:
            await self._refuse(request, error)(scope, receive, watched)
        except (ClientGone, ClientDisconnect):
            raise ClientGone from None
        except Exception:
            self._log(scope["path"])
            if not begun:
                failure = HttpError(500, "internal", "the daemon failed; its log says how")
                await failure.answer()(scope, receive, watched)

    def _log(self, path: str) -> None:
        now = self._monotonic()
        if now - self._logged_at >= ERROR_LOG_INTERVAL_S:
            self._logged_at = now
            logger.error("a request for %.200r failed", path, exc_info=True)


@dataclass(slots=True)
class _Bucket:
    requests: float
    since: float


class PeerLimit:
    """RATE_PER_S requests per second and BURST at once for each peer.

    Of more than MAX_PEERS the one that was silent for longest is forgotten.
    """

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._buckets: OrderedDict[str, _Bucket] = OrderedDict()

    def wait_s(self, peer: str) -> float:
        """Return 0 if the request is admitted, else the seconds until the next one would be."""
        now = self._monotonic()
        bucket = self._buckets.pop(peer, None) or _Bucket(BURST, now)
        bucket.requests = min(BURST, bucket.requests + (now - bucket.since) * RATE_PER_S)
        bucket.since = now
        self._buckets[peer] = bucket
        if len(self._buckets) > MAX_PEERS:
            self._buckets.popitem(last=False)
        if bucket.requests < 1:
            return (1 - bucket.requests) / RATE_PER_S
        bucket.requests -= 1
        return 0.0
