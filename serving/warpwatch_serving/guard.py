"""The ASGI middleware around all routes: passwords, security headers, counts, errors."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warpwatch_serving.access import LIVENESS, LOGIN, Access, Caller, unauthorized
from warpwatch_serving.answers import HttpError
from warpwatch_serving.bodies import MAX_BODY_BYTES, too_large
from warpwatch_serving.connection import ClientGone
from warpwatch_serving.web_config import BasicAuth

logger = logging.getLogger(__name__)

# An answer may bring its own of each.
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    # With no-referrer, browsers would hide the origin of our own forms, too.
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


Prepare = Callable[[], Awaitable[None]]


class Guard:
    """The middleware; the routes decide what an admitted request may see and do.

    count: receives the status of every answer. refuse: makes the answer to a request that was
    refused. prepare: fetches from other processes what an admitted request may need.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        access: Access,
        basic_auth: BasicAuth | None,
        count: Callable[[int], None],
        refuse: Callable[[HTTPConnection, HttpError], Response],
        prepare: Prepare | None = None,
    ) -> None:
        self._app = app
        self._access = access
        self._basic_auth = basic_auth
        self._count = count
        self._refuse = refuse
        self._prepare = prepare

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
            await self._admit(request)
            if self._prepare is not None and request.url.path not in self._access.open:
                await self._prepare()
            await self._app(scope, receive, watched)
        except HttpError as error:
            await self._refuse(request, error)(scope, receive, watched)
        except (ClientGone, ClientDisconnect):
            raise ClientGone from None
        except Exception:
            logger.exception("a request for %.200r failed", scope["path"])
            if not begun:
                failure = HttpError(500, "internal", "the daemon failed; its log says how")
                await failure.answer()(scope, receive, watched)

    async def _admit(self, request: HTTPConnection) -> None:
        """Leave the caller's rights in the request's state. Raises HttpError to refuse it."""
        length = request.headers.get("content-length", "0")
        if not length.isascii() or not length.isdigit() or int(length[:20]) > MAX_BODY_BYTES:
            raise too_large()
        caller, path = self._access.caller(request), request.url.path
        if caller is None and self._basic_auth is not None and path not in (LIVENESS, LOGIN):
            await self._basic_auth.check(request.headers.get("authorization", ""))
            caller = Caller(all_jobs=True)
        if caller is None and path not in self._access.open:
            raise unauthorized()
        request.scope.setdefault("state", {})["caller"] = caller or Caller()
