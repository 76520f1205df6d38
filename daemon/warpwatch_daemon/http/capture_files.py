"""The files of captures: traces to download, reports to read.

They hold what a training process wrote, so a browser gets them as data: a report runs in a sandbox
without scripts, everything else is not to be shown as a page.
"""

from __future__ import annotations

import re
from pathlib import Path

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from warpwatch_daemon.http.access import PERFETTO_ORIGIN, Access
from warpwatch_daemon.http.agent import Watcher
from warpwatch_daemon.http.answers import ApiError

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
    def __init__(self, watcher: Watcher, access: Access) -> None:
        self._watcher = watcher
        self._access = access

    async def send(self, request: Request) -> Response:
        """A file of a capture."""
        caller = self._access.check_files(request)
        capture_id, name = request.path_params["id"], request.path_params["file"]
        path = None
        if _NAME.fullmatch(capture_id) and _NAME.fullmatch(name):
            path = self._watcher.capture_file(capture_id, name, caller.owner)
        # Off the thread that serves: the store's disk may be slow.
        if path is None or not await run_in_threadpool(_is_plain_file, path):
            raise ApiError(404, "not_found", "there is no such capture or file")
        return FileResponse(path, headers=_headers(request, name))


def _is_plain_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _headers(request: Request, name: str) -> dict[str, str]:
    trace = name.endswith(TRACE_SUFFIXES)
    headers = {"Content-Type": next(kind for end, kind in _TYPES if name.endswith(end))}
    if trace or not name.endswith(_SHOWN):
        headers["Content-Disposition"] = f'attachment; filename="{name}"'
    if name.endswith(".html"):
        headers["Content-Security-Policy"] = _REPORT_POLICY
    if trace and request.headers.get("origin") == PERFETTO_ORIGIN:
        headers["Access-Control-Allow-Origin"] = PERFETTO_ORIGIN
    if trace:
        headers["Vary"] = "Origin"
    return headers
