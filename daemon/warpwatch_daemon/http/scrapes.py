"""The short way to ``/metrics``: a scraper sends the same bytes over a kept connection for ever.

What these bytes mean is worked out once, the usual way; when they come again, parser, router and
tasks are left out, and head and body are one write. Admission and counting stay.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.requests import HTTPConnection
from starlette.types import Scope

from warpwatch_daemon.http.guard import Admission
from warpwatch_daemon.http.metrics import Format, MetricsPages

# Of a request that is remembered with its connection; Prometheus sends about 300.
MAX_REQUEST_BYTES = 4096
# Headers that ask for more than an answer.
_UNUSUAL = frozenset({"content-length", "transfer-encoding", "expect", "upgrade"})


@dataclass(frozen=True, slots=True)
class Scrape:
    """The bytes of a whole ``GET /metrics`` and what they ask for."""

    data: bytes
    request: HTTPConnection
    form: Format


class Scrapes:
    """For the server's thread alone."""

    def __init__(
        self, pages: MetricsPages, admission: Admission, count: Callable[[int], None]
    ) -> None:
        self._pages = pages
        self._admission = admission
        self._count = count

    def recognize(self, data: bytes, scope: Scope) -> Scrape | None:
        """``scope`` is what the one whole request in ``data`` was parsed to."""
        plain = scope["method"] == "GET" and scope["path"] == "/metrics"
        if not plain or scope["http_version"] != "1.1" or len(data) > MAX_REQUEST_BYTES:
            return None
        request = HTTPConnection(scope)
        if not _UNUSUAL.isdisjoint(request.headers):
            return None
        return Scrape(data, request, Format.of(request.headers))

    def answer(self, scrape: Scrape, more: list[tuple[bytes, bytes]]) -> bytes | None:
        """The whole answer, with ``more`` headers, or None when the usual way has to be taken."""
        if not self._admission.admits_at_once(scrape.request):
            return None
        page = self._pages.page(scrape.form)
        self._count(200)
        lines = [b"%b: %b\r\n" % header for header in more]
        return b"".join((b"HTTP/1.1 200 OK\r\n", *lines, page.head, b"\r\n", page.content))

    def refresh(self) -> None:
        """To be called each second."""
        self._pages.refresh()
