"""``GET /`` and ``/run``, and the policy that lets a browser run nothing but what is ours."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from warpwatch_daemon import quantities
from warpwatch_daemon.http import models
from warpwatch_daemon.http.access import Caller, caller_of, visible
from warpwatch_daemon.http.agent import Watcher
from warpwatch_daemon.http.answers import ApiError
from warpwatch_daemon.http.page import captures, charts, devices, findings, jobs, minutes, runs
from warpwatch_daemon.http.page.headline import headline
from warpwatch_daemon.http.request_data import filters

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_SOURCES = 32
# No sentence of ours is longer.
MAX_TEXT = 400
_FOLDER = Path(__file__).parent / "templates"


class PageEndpoint:
    """Of an agent; ``templates``, ``name`` and ``modules`` are what another page has besides."""

    templates: tuple[Path, ...] = (_FOLDER,)
    name = "page.html"
    modules: Mapping[str, object] = {}

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    async def show(self, request: Request) -> Response:
        """The web page; ``show``: the id of an anomaly or a capture that is to be on top."""
        show = filters(request, models.PageFilters).show
        return await run_in_threadpool(self._answer, self.name, caller_of(request), show=show)

    async def show_run(self, request: Request) -> Response:
        """The page of a run: its figures, and what has changed since the one before."""
        wanted = filters(request, models.RunFilters)
        return await run_in_threadpool(self._answer, "run.html", caller_of(request), wanted)

    def _answer(
        self,
        name: str,
        caller: Caller,
        run: models.RunFilters | None = None,
        show: str | None = None,
    ) -> Response:
        state, known = self._watcher.state(), self._watcher.run_summaries()
        state = visible(state, caller.owner)
        known = [one for one in known if caller.owner in (None, one.owner)]
        chosen = None if run is None else runs.chosen(known, run)
        if run is not None and chosen is None:
            raise ApiError(404, "not_found", "there is no such run")
        page = self._environment.get_template(name).render(
            state=state,
            headline=headline(state),
            files_open=caller.files,
            known=known,
            run=chosen,
            show=show,
        )
        headers = {"Content-Security-Policy": self._policy}
        return Response(page, headers=headers, media_type="text/html")

    @cached_property
    def _environment(self) -> Environment:
        # The page may never be opened: jinja2 takes memory only once it is.
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

        environment = Environment(
            loader=FileSystemLoader(self.templates),
            autoescape=True,
            finalize=_cut,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        for name in ("ago", "seconds", "sentence", "text", "timestamp"):
            environment.filters[name] = getattr(quantities, name)
        # What a section asks for lies in the module of its name.
        environment.globals |= {
            "no_step": quantities.no_step,
            "uncounted": quantities.uncounted,
            "places": quantities.places,
            "captures": captures,
            "charts": charts,
            "devices": devices,
            "findings": findings,
            "jobs": jobs,
            "max_sources": MAX_SOURCES,
            "minutes": minutes,
            "runs": runs,
            **self.modules,
        }
        return environment

    @cached_property
    def _policy(self) -> str:
        return (
            f"default-src 'none'; style-src '{_digest('style.css')}'; "
            f"script-src '{_digest('refresh.js')}'; connect-src 'self'; img-src data:; "
            "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )


def _cut(value: object) -> object:
    """Of all that a template prints: what a process says of itself is one line of bounded length.

    Not of drawings, and not of what a macro has printed.
    """
    return value if hasattr(value, "__html__") else quantities.text(value, MAX_TEXT)


def _digest(name: str) -> str:
    """The hash of an inline file, as a content security policy names it."""
    digest = hashlib.sha256((_FOLDER / name).read_bytes()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
