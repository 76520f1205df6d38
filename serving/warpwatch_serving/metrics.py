"""``/metrics``: the newest state, and what the daemon counts about itself.

prometheus_client decides from a scraper's headers in which format; its encoder writes the daemon's
own metrics, ours the state. A page is rendered at most once per second. For a scraper that comes
every second it is rendered ahead of time, so that a scrape only sends it.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client.exposition import choose_encoder, generate_latest, gzip_accepted
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.requests import Request
from starlette.responses import Response

from warpwatch_exporters.prometheus import render
from warpwatch_serving.backend import ApiBackend

# Fastest: a node has its cycles for something else than a denser scrape.
GZIP_LEVEL = 1
# The sources' interval, and a tenth for a refresh that comes late.
MAX_AGE_S = 1.1
# At longer intervals a page is rendered on the scrape, to be as fresh as possible.
AHEAD_INTERVAL_S = 2.0


@dataclass(slots=True)
class MetricsPage:
    """One format's newest page.

    Times are of the monotonic clock; ``interval_s`` lay between the last two requests for it.
    """

    content: bytes = b""
    rendered_at: float = -math.inf
    asked_at: float = -math.inf
    interval_s: float = math.inf


class MetricsPages:
    """For the server's thread alone."""

    def __init__(
        self, backend: ApiBackend, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._monotonic = monotonic
        # By format: whether it is OpenMetrics, and compressed.
        self._pages: dict[tuple[bool, bool], MetricsPage] = {}

    async def scrape(self, request: Request) -> Response:
        """Prometheus text format or OpenMetrics, by Accept."""
        media_type = _media_type(request.headers.get("accept", ""))
        compressed = gzip_accepted(request.headers.get("accept-encoding", ""))
        page = self.page("openmetrics" in media_type, compressed)
        headers = {"content-type": media_type, "vary": "Accept, Accept-Encoding"}
        if compressed:
            headers["content-encoding"] = "gzip"
        return Response(page.content, headers=headers)

    def page(self, is_openmetrics: bool, compressed: bool) -> MetricsPage:
        """Return a page that is at most MAX_AGE_S old. Raises what the agent raises."""
        now = self._monotonic()
        form = is_openmetrics, compressed
        page = self._pages.setdefault(form, MetricsPage())
        page.interval_s, page.asked_at = now - page.asked_at, now
        if now - page.rendered_at > MAX_AGE_S:
            self._render(form, page, now)
        return page

    def refresh(self) -> None:
        """Render again what is asked for all the time; to be called each second."""
        now = self._monotonic()
        for form, page in self._pages.items():
            if max(page.interval_s, now - page.asked_at) <= AHEAD_INTERVAL_S:
                # A scrape that meets the same fault reports it.
                with contextlib.suppress(Exception):
                    self._render(form, page, now)

    def _render(self, form: tuple[bool, bool], page: MetricsPage, now: float) -> None:
        is_openmetrics, compressed = form
        encode = openmetrics.generate_latest if is_openmetrics else generate_latest
        options = self._backend.exposition()
        state = render(self._backend.exported(), options, openmetrics=is_openmetrics)
        content = state + encode(self._backend.metrics.registry)
        page.content = gzip.compress(content, GZIP_LEVEL) if compressed else content
        page.rendered_at = now


def _media_type(accept: str) -> str:
    """Return the library's choice. Escaping changes none of our names."""
    try:
        return choose_encoder(accept)[1]
    except TypeError:
        # The version is not a number: use the default format.
        return choose_encoder("")[1]
