"""``GET /`` and ``/run``, and the policy that lets a browser run only our own script."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from warpwatch_runtime import quantities
from warpwatch_serving.access import Caller, caller_of
from warpwatch_serving.answers import HttpError
from warpwatch_serving.backend import ApiBackend, visible
from warpwatch_serving.bodies import PageFilters, RunFilters, filters
from warpwatch_serving.page import captures, charts, devices, findings, jobs, runs, servers
from warpwatch_serving.page.findings import Headline, headline
from warpwatch_serving.page.jobs import ranked
from warpwatch_serving.page.selection import Selection
from warpwatch_telemetry.jobs import RunSummary
from warpwatch_telemetry.state import State

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_SOURCES = 32
# All our own sentences are shorter.
MAX_TEXT = 400
NOTHING_FOUND = Headline("idle", "Nothing matches the search")
FOLDER = Path(__file__).parent / "templates"
STYLE = FOLDER / "style.css"
SCRIPT = FOLDER / "refresh.js"


class PageEndpoint:
    """The page of an agent; another page has its own ``templates``, ``name`` and ``modules``."""

    templates: tuple[Path, ...] = (FOLDER,)
    name = "page.html"
    modules: Mapping[str, object] = {}

    def __init__(self, backend: ApiBackend) -> None:
        self._backend = backend

    async def show(self, request: Request) -> Response:
        """The web page; ``show``: the id of an anomaly or a capture that is to be on top."""
        wanted = filters(request, PageFilters)
        return await run_in_threadpool(self._show, request, wanted)

    async def show_run(self, request: Request) -> Response:
        """The page of a run: its figures, and what has changed since the one before."""
        wanted = filters(request, RunFilters)
        return await run_in_threadpool(self._show_run, request, wanted)

    def _show(self, request: Request, wanted: PageFilters) -> Response:
        state, known = self._known(caller_of(request))
        selection = Selection(state, wanted)
        state = selection.state
        return self._answer(
            request,
            self.name,
            state=state,
            selection=selection,
            wanted=wanted,
            ranked=ranked(state),
            headline=NOTHING_FOUND if selection.is_empty else headline(state),
            known=[one for one in known if selection.has_job(one.job_id)],
        )

    def _show_run(self, request: Request, wanted: RunFilters) -> Response:
        state, known = self._known(caller_of(request))
        run = runs.chosen(known, wanted)
        if run is None:
            raise HttpError(404, "not_found", "there is no such run")
        return self._answer(request, "run.html", state=state, known=known, run=run)

    def _known(self, caller: Caller) -> tuple[State, list[RunSummary]]:
        """Return the part of the state and of the runs that the caller may see."""
        state, known = self._backend.state(), self._backend.run_summaries()
        return visible(state, caller.owner), [
            one for one in known if caller.owner in (None, one.owner)
        ]

    def _answer(self, request: Request, name: str, **about: object) -> Response:
        page = self._environment.get_template(name).render(
            files_open=caller_of(request).files, has_session="cookie" in request.headers, **about
        )
        headers = {"Content-Security-Policy": policy()}
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
        # Each section calls the module of its name.
        environment.globals |= {
            "no_step": quantities.no_step,
            "uncounted": quantities.uncounted,
            "places": quantities.places,
            "captures": captures,
            "charts": charts,
            "devices": devices,
            "findings": findings,
            "jobs": jobs,
            "servers": servers,
            "max_sources": MAX_SOURCES,
            "runs": runs,
            **self.modules,
        }
        return environment


@cache
def policy() -> str:
    """Return the content security policy of all pages."""
    return (
        f"default-src 'none'; style-src '{_digest(STYLE)}'; script-src '{_digest(SCRIPT)}'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'self'; "
        "frame-ancestors 'none'"
    )


def _cut(value: object) -> object:
    """Cut text that a template prints to one line of bounded length, but no drawings and macros."""
    return value if hasattr(value, "__html__") else quantities.text(value, MAX_TEXT)


def _digest(path: Path) -> str:
    """Return the hash of an inline file, as a content security policy names it."""
    digest = hashlib.sha256(path.read_bytes()).digest()
    return f"sha256-{base64.b64encode(digest).decode()}"
