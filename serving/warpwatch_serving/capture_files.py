"""The files of captures: traces to download, reports to read.

They hold what a training process wrote, so a browser gets them as data: a report runs in a sandbox
without scripts, everything else is not to be shown as a page.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse

from warpwatch_serving.access import Access
from warpwatch_serving.answers import HttpError
from warpwatch_serving.backend import ApiBackend
from warpwatch_telemetry.errors import Refused

TRACE_SUFFIXES = (".pt.trace.json", ".pt.trace.json.gz")

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._#-]{0,199}")
# By the end of the name, the first that fits.
_TYPES = (
    (".gz", "application/gzip"),
    (".json", "application/json"),
    (".html", "text/html; charset=utf-8"),
    (".txt", "text/plain; charset=utf-8"),
    ("", "application/octet-stream"),
)
# Read in the browser; the rest is downloaded.
_SHOWN = (".html", ".txt", ".json")
_REPORT_POLICY = (
    "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class CaptureFiles:
    def __init__(self, backend: ApiBackend, access: Access) -> None:
        self._backend = backend
        self._access = access

    async def send(self, request: Request) -> Response:
        """A file of a capture."""
        caller = self._access.check_files(request)
        capture_id, name = request.path_params["id"], request.path_params["file"]
        found = None
        if _NAME.fullmatch(capture_id) and _NAME.fullmatch(name):
            # Off the thread that serves: the store's disk may be slow, or another node.
            try:
                found = await run_in_threadpool(self._find, capture_id, name, caller.owner)
            except Refused as error:
                raise HttpError(503, error.reason, str(error)) from error
        if found is None:
            raise HttpError(404, "not_found", "there is no such capture or file")
        headers = _headers(name)
        if isinstance(found, Path):
            return FileResponse(found, headers=headers)
        # Of another node, which is believed less.
        headers["Content-Disposition"] = f'attachment; filename="{name}"'
        return StreamingResponse(found, headers=headers | {"Content-Security-Policy": "sandbox"})

    def _find(self, capture: str, name: str, owner: str | None) -> Path | Iterator[bytes] | None:
        found = self._backend.capture_file(capture, name, owner)
        is_plain = not isinstance(found, Path) or (found.is_file() and not found.is_symlink())
        return found if is_plain else None


def _headers(name: str) -> dict[str, str]:
    trace = name.endswith(TRACE_SUFFIXES)
    headers = {"Content-Type": next(kind for end, kind in _TYPES if name.endswith(end))}
    if trace or not name.endswith(_SHOWN):
        headers["Content-Disposition"] = f'attachment; filename="{name}"'
    if name.endswith(".html"):
        headers["Content-Security-Policy"] = _REPORT_POLICY
    return headers
