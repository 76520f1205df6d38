"""``/metrics``: the newest state in the format that the scraper asks for.

A page is rendered at most once a second, however many ask for it, and ahead of time for who comes
every second: a scrape then sends bytes that are there already.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response

from warpwatch_daemon.http.backend import Backend
from warpwatch_exporters.prometheus import OPENMETRICS_TYPE, TEXT_TYPE, render

_OPENMETRICS = "application/openmetrics-text"
# Of the versions of OpenMetrics, what is written satisfies these; no version means any.
_VERSIONS = frozenset({"", "0.0.1", "1.0.0"})
# Fastest: a node has its cycles for something else than a denser scrape.
GZIP_LEVEL = 1
# What the sources' intervals are, and a tenth for a refresh that comes late.
MAX_AGE_S = 1.1
# Who scrapes at longer intervals gets a page rendered when asked for: as fresh as can be.
AHEAD_INTERVAL_S = 2.0


@dataclass(frozen=True, slots=True)
class Format:
    """How a page is written; each has a page of its own."""

    openmetrics: bool
    gzip: bool

    @classmethod
    def of(cls, headers: Headers) -> Format:
        """What the headers of a request ask for."""
        return cls(
            openmetrics=wants_openmetrics(headers.get("accept", "")),
            gzip=accepts_gzip(headers.get("accept-encoding", "")),
        )

    def headers(self) -> dict[str, str]:
        media_type = OPENMETRICS_TYPE if self.openmetrics else TEXT_TYPE
        encoding = {"content-encoding": "gzip"} if self.gzip else {}
        return {"content-type": media_type, "vary": "Accept, Accept-Encoding", **encoding}


@dataclass(slots=True)
class Page:
    """One format's newest page.

    Times are of the monotonic clock; ``interval_s`` lay between the last two requests for it.
    """

    content: bytes = b""
    rendered_at: float = -math.inf
    asked_at: float = -math.inf
    interval_s: float = math.inf


class MetricsPages:
    """For the server's thread alone."""

    def __init__(self, backend: Backend, clock: Callable[[], float] = time.monotonic) -> None:
        self._backend = backend
        self._clock = clock
        self._pages: dict[Format, Page] = {}

    def page(self, form: Format) -> Page:
        """At most MAX_AGE_S old. Raises what the backend raises."""
        now = self._clock()
        page = self._pages.setdefault(form, Page())
        page.interval_s, page.asked_at = now - page.asked_at, now
        if now - page.rendered_at > MAX_AGE_S:
            self._render(form, page, now)
        return page

    def refresh(self) -> None:
        """Render anew what is asked for all the time; to be called each second."""
        now = self._clock()
        for form, page in self._pages.items():
            if max(page.interval_s, now - page.asked_at) <= AHEAD_INTERVAL_S:
                # A scrape that meets the same fault reports it.
                with contextlib.suppress(Exception):
                    self._render(form, page, now)

    async def scrape(self, request: Request) -> Response:
        form = Format.of(request.headers)
        return Response(self.page(form).content, headers=form.headers())

    def _render(self, form: Format, page: Page, now: float) -> None:
        options = self._backend.exposition()
        content = render(self._backend.state(), options, openmetrics=form.openmetrics)
        page.content = gzip.compress(content, GZIP_LEVEL) if form.gzip else content
        page.rendered_at = now


def wants_openmetrics(accept: str) -> bool:
    """Whether OpenMetrics is named and liked at least as much as plain text."""
    text = openmetrics = 0.0
    for name, parameters, quality in _choices(accept):
        if name == _OPENMETRICS and parameters.get("version", "") in _VERSIONS:
            openmetrics = max(openmetrics, quality)
        elif name == "text/plain":
            text = max(text, quality)
    return openmetrics > 0 and openmetrics >= text


def accepts_gzip(accept_encoding: str) -> bool:
    return any(name == "gzip" and quality > 0 for name, _, quality in _choices(accept_encoding))


def _choices(header: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Name, parameters and quality of each choice in an Accept or Accept-Encoding header."""
    for choice in header.split(","):
        name, *rest = (part.strip() for part in choice.split(";"))
        parameters = {
            key.strip().lower(): value.strip(' "')
            for key, _, value in (part.partition("=") for part in rest)
        }
        try:
            quality = float(parameters.get("q", "1"))
        except ValueError:
            quality = 0.0
        yield name.lower(), parameters, quality
