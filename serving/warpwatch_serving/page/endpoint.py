"""``GET /`` and ``/run``, the login, and the policy that lets a browser run only our own script.

A link that is valid once, or the token, starts a session of the browser.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from functools import cache, cached_property
from html import escape
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response

from warpwatch_runtime import quantities
from warpwatch_serving import access as rights
from warpwatch_serving.access import Access, Caller, caller_of
from warpwatch_serving.answers import HttpError, SessionLink, json_answer
from warpwatch_serving.backend import ApiBackend, visible
from warpwatch_serving.bodies import LoginFilters, PageFilters, RunFilters, filters, read_body
from warpwatch_serving.page import captures, charts, devices, findings, jobs, runs
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
SECTIONS = (captures, charts, devices, findings, jobs, runs)
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
        state, known = self._backend.state(), self._backend.run_summaries()
        return visible(state, caller.owner), [
            one for one in known if caller.owner in (None, one.owner)
        ]

    def _answer(self, request: Request, name: str, **about: object) -> Response:
        page = self._environment.get_template(name).render(
            files_open=caller_of(request).captures, has_session="cookie" in request.headers, **about
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
            "max_sources": MAX_SOURCES,
            **{one.__name__.rpartition(".")[2]: one for one in SECTIONS},
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


# --- the login ---

_UNKNOWN_LINK = (
    "This link is not known here: it has been used, is older than a minute, or another process "
    "made it. Only the worker of a fleet that made a link knows it."
)
_WRONG_TOKEN = "This is not the token."
_TOKEN_FORM = """<form class="filters" method="post" action="/login">
    <input type="password" name="token" aria-label="Token" autocomplete="current-password" required>
    <button class="button">Sign in</button>
  </form>"""
_NO_TOKEN = '<p class="quiet">None is configured (<code>{}.token_file</code>).</p>'


class Login:
    """Makes links, and turns them or the token into sessions."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def make_link(self, request: Request) -> Response:
        """A link to the web page for the user who asks, valid once and for a minute."""
        key = await self._access.links.issue(self._access.check_link(request))
        path = f"{rights.LOGIN}?{urlencode({'key': key})}"
        return json_answer(SessionLink(path, rights.LINK_S, request.app.state.url), 201)

    async def follow_link(self, request: Request) -> Response:
        """The login page; with the key of a link, the start of a session."""
        key = filters(request, LoginFilters).key
        if key is None:
            return self._page(request, 200)
        caller = await self._access.links.end(key)
        if caller is None:
            return self._page(request, 401, _UNKNOWN_LINK)
        return await self._start(request, caller)

    async def log_in(self, request: Request) -> Response:
        """The start of a session with the token that the form of the login page sends."""
        form = parse_qs((await read_body(request)).decode("utf-8", "replace"))
        token = form.get("token", [""])[0]
        if not rights.has_own_origin(request) or not self._access.is_token(token):
            return self._page(request, 401, _WRONG_TOKEN)
        return await self._start(request, rights.HOLDER_OF_TOKEN)

    async def log_out(self, request: Request) -> Response:
        """The end of the session."""
        await self._access.sessions.end(request.cookies.get(self._access.cookie, ""))
        return self._redirect(request, rights.LOGIN, "", 0)

    def refuse(self, request: HTTPConnection, error: HttpError) -> Response:
        """Return the login page to a browser without a session, and the error to all others."""
        if error.status == 401 and "text/html" in request.headers.get("accept", ""):
            return self._page(request, 401, headers=error.headers)
        return error.answer()

    async def _start(self, request: Request, caller: Caller) -> Response:
        key = await self._access.sessions.issue(caller)
        return self._redirect(request, "/", key, rights.SESSION_S)

    def _redirect(self, request: Request, path: str, key: str, lasts_s: float) -> Response:
        tls = request.url.scheme == "https"
        header = cookie(self._access.cookie, key, lasts_s, tls=tls)
        return RedirectResponse(path, 303, {"Set-Cookie": header})

    def _page(
        self,
        request: HTTPConnection,
        status: int,
        message: str = "",
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        token_file, section = self._access.token_file, self._access.section
        base = f"{request.url.scheme}://{request.headers.get('host', 'localhost:9400')}"
        page = self._template.substitute(
            style=STYLE.read_text(),
            message=f'<p class="lost" role="alert">{message}</p>' if message else "",
            base=escape(base[:200]),
            options=" --fleet" if section == "fleet" else "",
            token=_TOKEN_FORM if token_file else _NO_TOKEN.format(section),
        )
        all_headers = {"Content-Security-Policy": policy(), **(headers or {})}
        return Response(page, status, all_headers, "text/html")

    @cached_property
    def _template(self) -> Template:
        return Template((FOLDER / "login.html").read_text())


def cookie(name: str, key: str, lasts_s: float, *, tls: bool) -> str:
    """Return the header Set-Cookie.

    Lax, not Strict: a link in a message or a dashboard is to open the page, logged in.
    """
    secure = "; Secure" if tls else ""
    return f"{name}={key}; Path=/; Max-Age={lasts_s:.0f}; HttpOnly; SameSite=Lax{secure}"
