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

from warpwatch_runtime import quantities
from warpwatch_serving import models
from warpwatch_serving.access import Caller, caller_of, visible
from warpwatch_serving.answers import ApiError
from warpwatch_serving.page import captures, charts, devices, findings, jobs, minutes, runs
from warpwatch_serving.page.headline import Headline, headline
from warpwatch_serving.page.job_order import ranked
from warpwatch_serving.page.selection import Selection
from warpwatch_serving.request_data import filters
from warpwatch_serving.watcher import Watcher
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.state import State

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_SOURCES = 32
# No sentence of ours is longer.
MAX_TEXT = 400
NOTHING_FOUND = Headline("idle", "Nothing matches the search")
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
        wanted = filters(request, models.PageFilters)
        return await run_in_threadpool(self._show, caller_of(request), wanted)

    async def show_run(self, request: Request) -> Response:
        """The page of a run: its figures, and what has changed since the one before."""
        wanted = filters(request, models.RunFilters)
        return await run_in_threadpool(self._show_run, caller_of(request), wanted)

    def _show(self, caller: Caller, wanted: models.PageFilters) -> Response:
        state, known = self._known(caller)
        selection = Selection(state, wanted)
        state = selection.state
        return self._answer(
            self.name,
            state=state,
            selection=selection,
            wanted=wanted,
            ranked=ranked(state),
            headline=NOTHING_FOUND if selection.is_empty else headline(state),
            files_open=caller.files,
            known=[one for one in known if selection.has_job(one.job_id)],
        )

    def _show_run(self, caller: Caller, wanted: models.RunFilters) -> Response:
        state, known = self._known(caller)
        run = runs.chosen(known, wanted)
        if run is None:
            raise ApiError(404, "not_found", "there is no such run")
        return self._answer("run.html", state=state, files_open=caller.files, known=known, run=run)

    def _known(self, caller: Caller) -> tuple[State, list[RunSummary]]:
        """Return the part of the state and of the runs that the caller may see."""
        state, known = self._watcher.state(), self._watcher.run_summaries()
        return visible(state, caller.owner), [
            one for one in known if caller.owner in (None, one.owner)
        ]

    def _answer(self, name: str, **about: object) -> Response:
        page = self._environment.get_template(name).render(about)
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
            "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
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
