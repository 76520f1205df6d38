"""Probes on a port of their own, which no client of the API can hold."""

from __future__ import annotations

from collections.abc import Callable

from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send


class Probes:
    """The application of that port. ``missing`` returns why the process is not ready."""

    def __init__(self, missing: Callable[[], tuple[str, ...]]) -> None:
        self._missing = missing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 404
        document: dict[str, object] = {
            "error": {"reason": "not_found", "detail": "only probes are here"}
        }
        if scope["method"] in ("GET", "HEAD") and scope["path"] == "/healthz":
            status, document = 200, {"status": "ok"}
        elif scope["method"] in ("GET", "HEAD") and scope["path"] == "/readyz":
            missing = self._missing()
            status, document = 503 if missing else 200, {"ready": not missing}
        await JSONResponse(document, status)(scope, receive, send)
