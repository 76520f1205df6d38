"""The login: a link that is valid once, or the token, for a session of the browser."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from html import escape
from string import Template
from urllib.parse import parse_qs, urlencode

from starlette.requests import HTTPConnection, Request
from starlette.responses import RedirectResponse, Response

from warpwatch_serving.access import HOLDER_OF_TOKEN, LOGIN, Access, Caller, has_own_origin
from warpwatch_serving.answers import HttpError, SessionLink, json_answer
from warpwatch_serving.bodies import LoginFilters, filters, read_body
from warpwatch_serving.page.endpoint import FOLDER, STYLE, policy
from warpwatch_serving.sessions import LINK_S, SESSION_S, cookie

_USED = "This link has been used or is older than a minute."
_WRONG_TOKEN = "This is not the token."
_TOKEN_FORM = """<form class="filters" method="post" action="/login">
    <input type="password" name="token" aria-label="Token" autocomplete="current-password" required>
    <button class="button">Sign in</button>
  </form>"""
_NO_TOKEN = '<p class="quiet">None is configured (<code>http.token_file</code>).</p>'


class Login:
    """Makes links, and turns them or the token into sessions."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def make_link(self, request: Request) -> Response:
        """A link to the web page for the user who asks, valid once and for a minute."""
        key = self._access.links.issue(self._access.check_link(request))
        path = f"{LOGIN}?{urlencode({'key': key})}"
        return json_answer(SessionLink(path, LINK_S, request.app.state.url), 201)

    async def follow_link(self, request: Request) -> Response:
        """The login page; with the key of a link, the start of a session."""
        key = filters(request, LoginFilters).key
        if key is None:
            return self._page(request, 200)
        caller = self._access.links.end(key)
        return self._page(request, 401, _USED) if caller is None else self._start(request, caller)

    async def log_in(self, request: Request) -> Response:
        """The start of a session with the token that the form of the login page sends."""
        form = parse_qs((await read_body(request)).decode("utf-8", "replace"))
        token = form.get("token", [""])[0]
        if not has_own_origin(request) or not self._access.is_token(token):
            return self._page(request, 401, _WRONG_TOKEN)
        return self._start(request, HOLDER_OF_TOKEN)

    async def log_out(self, request: Request) -> Response:
        """The end of the session."""
        self._access.sessions.end(request.cookies.get(self._access.cookie, ""))
        return self._redirect(request, LOGIN, "", 0)

    def refuse(self, request: HTTPConnection, error: HttpError) -> Response:
        """Return the login page to a browser without a session, and the error to all others."""
        if error.status == 401 and "text/html" in request.headers.get("accept", ""):
            return self._page(request, 401, headers=error.headers)
        return error.answer()

    def _start(self, request: Request, caller: Caller) -> Response:
        return self._redirect(request, "/", self._access.sessions.issue(caller), SESSION_S)

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
        base = f"{request.url.scheme}://{request.headers.get('host', 'localhost:9400')}"
        page = self._template.substitute(
            style=STYLE.read_text(),
            message=f'<p class="lost" role="alert">{message}</p>' if message else "",
            base=escape(base[:200]),
            token=_TOKEN_FORM if self._access.token else _NO_TOKEN,
        )
        all_headers = {"Content-Security-Policy": policy(), **(headers or {})}
        return Response(page, status, all_headers, "text/html")

    @cached_property
    def _template(self) -> Template:
        return Template((FOLDER / "login.html").read_text())
