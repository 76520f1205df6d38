"""Probes on a listener of their own: whoever holds the API's connections, they are answered.

One short request, one short answer, and the connection is closed. Where there are too many, the
oldest gives way.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

TIMEOUT_S = 2.0
MAX_HEAD_BYTES = 4096
MAX_CONNECTIONS = 64

_PHRASES = {200: "OK", 404: "Not Found", 503: "Service Unavailable"}


class Probes:
    """``missing``: what keeps the daemon from being ready, one line each."""

    def __init__(self, missing: Callable[[], tuple[str, ...]]) -> None:
        self._missing = missing
        self._open: dict[asyncio.Transport, None] = {}

    def connect(self) -> asyncio.Protocol:
        """A protocol for each new connection."""
        return _Probe(self)

    def admit(self, transport: asyncio.Transport) -> None:
        if len(self._open) >= MAX_CONNECTIONS:
            next(iter(self._open)).abort()
            del self._open[next(iter(self._open))]
        self._open[transport] = None

    def forget(self, transport: asyncio.Transport) -> None:
        self._open.pop(transport, None)

    def answer(self, head: bytes) -> bytes:
        method, _, rest = head.partition(b" ")
        path = rest.partition(b" ")[0].partition(b"?")[0]
        status = 404
        document: dict[str, Any] = {
            "error": {"reason": "not_found", "detail": "only probes are here"}
        }
        if method in (b"GET", b"HEAD") and path == b"/healthz":
            status, document = 200, {"status": "ok"}
        elif method in (b"GET", b"HEAD") and path == b"/readyz":
            missing = self._missing()
            status, document = 503 if missing else 200, {"ready": not missing}
        return _response(status, document, with_body=method != b"HEAD")


class _Probe(asyncio.Protocol):
    def __init__(self, probes: Probes) -> None:
        self._probes = probes
        self._head = b""

    def connection_made(self, transport: Any) -> None:
        self._transport: asyncio.Transport = transport
        self._probes.admit(transport)
        # Also of one that takes no answer.
        asyncio.get_running_loop().call_later(TIMEOUT_S, transport.abort)

    def connection_lost(self, _: Exception | None) -> None:
        self._probes.forget(self._transport)

    def data_received(self, data: bytes) -> None:
        if self._transport.is_closing():
            return
        self._head += data
        if b"\r\n\r\n" in self._head:
            self._transport.write(self._probes.answer(self._head))
            self._transport.close()
        elif len(self._head) > MAX_HEAD_BYTES:
            self._transport.abort()


def _response(status: int, document: dict[str, Any], *, with_body: bool) -> bytes:
    body = json.dumps(document).encode() + b"\n"
    head = (
        f"HTTP/1.1 {status} {_PHRASES[status]}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
