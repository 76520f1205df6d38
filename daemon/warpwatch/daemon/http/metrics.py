"""``/metrics``: the newest state in the format that the scraper asks for."""

from __future__ import annotations

import gzip
from collections.abc import Iterator

from starlette.requests import Request
from starlette.responses import Response

from warpwatch.daemon.http.backend import Backend
from warpwatch.exporters.prometheus import OPENMETRICS_TYPE, TEXT_TYPE, render

_OPENMETRICS = "application/openmetrics-text"
# Of the versions of OpenMetrics, what is written satisfies these; no version means any.
_VERSIONS = frozenset({"", "0.0.1", "1.0.0"})
# Fastest: a node has its cycles for something else than a denser scrape.
GZIP_LEVEL = 1


class MetricsEndpoint:
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def scrape(self, request: Request) -> Response:
        openmetrics = wants_openmetrics(request.headers.get("accept", ""))
        content = render(self._backend.state(), openmetrics=openmetrics)
        headers = {"Vary": "Accept, Accept-Encoding"}
        if accepts_gzip(request.headers.get("accept-encoding", "")):
            content = gzip.compress(content, compresslevel=GZIP_LEVEL)
            headers["Content-Encoding"] = "gzip"
        media_type = OPENMETRICS_TYPE if openmetrics else TEXT_TYPE
        return Response(content, headers=headers | {"Content-Type": media_type})


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
