"""Who may do what: the token, links and sessions, and the middleware around all routes.

No identity is guessed from addresses or headers of a proxy. A restart ends links, and sessions that
no other process keeps.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from warpwatch_serving.answers import HttpError
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.connection import ClientGone, Peer
from warpwatch_serving.web_config import BasicAuth
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.newest import NewestMap

logger = logging.getLogger(__name__)

LIVENESS, METRICS, LOGIN = "/healthz", "/metrics", "/login"
OPEN = frozenset({LIVENESS, "/readyz", METRICS, LOGIN})
LINK_S = 60.0
SESSION_S = 12 * 3600.0
# For one more, the oldest key of the user goes, or the oldest of all.
MAX_OF_USER = 16
MAX_KEYS = 1024
# The owner of no job.
NO_OWNER = "none"

_NO_USER = "this process is in another user namespace, or root's in a container: use the token"
_NEEDS_LOGIN = (
    "over TCP this needs a session or the token: open the link that `warpwatch page` (--fleet) "
    "prints where it runs, or send `Authorization: Bearer …` (--token-file FILE); on the node "
    "commands need neither without --url and WARPWATCH_URL"
)
_WRONG_TOKEN = "the token is not that in the file token_file of this process"
_FOREIGN_ORIGIN = (
    "a session changes something only from its own page: the header Origin has another address"
)


@dataclass(frozen=True, slots=True)
class Caller:
    """The rights of a request.

    uid: the user whose jobs are visible and may be captured. all_jobs: whether everybody's are.
    captures: whether captures may be requested, and their files read.
    """

    uid: int | None = None
    all_jobs: bool = False
    captures: bool = False

    @property
    def owner(self) -> str | None:
        """The only owner whose jobs are visible: NO_OWNER without a user, None for all owners."""
        if self.all_jobs:
            return None
        return NO_OWNER if self.uid is None else f"uid/{self.uid}"


HOLDER_OF_TOKEN = Caller(all_jobs=True, captures=True)


class Keys:
    """Secrets that stand for a caller's rights for ``lasts_s``; only their digests are kept.

    site: the name of the page that they open. A subclass may keep them for several processes.
    """

    def __init__(self, lasts_s: float, monotonic: Callable[[], float], site: str) -> None:
        self.site = site
        self._lasts_s, self._monotonic = lasts_s, monotonic
        self._known: NewestMap[str, tuple[Caller, float]] = NewestMap(MAX_KEYS)

    async def issue(self, caller: Caller) -> str:
        """Return a new key with the rights of the caller."""
        own = [name for name, (known, _) in self._known.items() if known == caller]
        if len(own) >= MAX_OF_USER:
            await self.keep(own[0], None)
        key = secrets.token_urlsafe(32)
        await self.keep(_digest(key), caller)
        return key

    async def find(self, key: str) -> Caller | None:
        """Return the caller, None for a key that is unknown, used or expired."""
        return await self.kept(_digest(key)) if key else None

    async def end(self, key: str) -> Caller | None:
        """Return the caller as ``find`` does, and forget the key."""
        caller = await self.find(key)
        await self.keep(_digest(key), None)
        return caller

    async def keep(self, name: str, caller: Caller | None) -> None:
        """Give the key with this digest the rights of the caller; without a caller, end it."""
        self._known.pop(name, None)
        if caller is not None:
            self._known[name] = caller, self._monotonic() + self._lasts_s

    async def kept(self, name: str) -> Caller | None:
        """Return the caller of the key with this digest."""
        caller, until = self._known.get(name, (None, 0.0))
        return caller if until > self._monotonic() else None


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class Access:
    """Finds the rights of a request. Raises UsageError if the token file cannot be used."""

    def __init__(
        self, config: HttpConfig, monotonic: Callable[[], float], sessions: Keys | None = None
    ) -> None:
        if config.metrics_token and config.token_file is None:
            raise UsageError(f"{config.section}.metrics_token: token_file is needed, too")
        self.token_file, self.section = config.token_file, config.section
        if self.token_file is not None:
            read_token(self.token_file, f"{self.section}.token_file")
        # Open to everybody: a probe has no password, and the login comes before the rights.
        self.open = OPEN - {METRICS} if config.metrics_token else OPEN
        here = f"{socket.gethostname()} {config.listen}"
        self.links = Keys(LINK_S, monotonic, here)
        self.sessions = sessions or Keys(SESSION_S, monotonic, here)
        # A browser sends it to every port of a host.
        self.cookie = f"warpwatch-{_digest(self.sessions.site)[:8]}"

    def is_token(self, token: str) -> bool:
        """Return whether this is the token in the file, which may be replaced at any time."""
        with suppress(UsageError):
            sent, path = token.strip().encode("utf-8", "surrogateescape"), self.token_file
            return path is not None and hmac.compare_digest(sent, read_token(path, "token_file"))
        return False

    def has_token(self, request: HTTPConnection) -> bool:
        """Return whether the token comes with the request."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self.is_token(token)

    async def caller(self, request: HTTPConnection) -> Caller | None:
        """Return the rights, None if there are none. Raises HttpError if they do not suffice."""
        if self.has_token(request):
            return HOLDER_OF_TOKEN
        peer = _peer_of(request)
        if peer.on_socket:
            if peer.uid is None and request.scope["path"] not in self.open:
                raise HttpError(403, "unknown_user", _NO_USER)
            return Caller(peer.uid, peer.privileged, captures=True)
        session = await self.sessions.find(request.cookies.get(self.cookie, ""))
        changes = request.scope["method"] not in ("GET", "HEAD")
        if session and changes and not has_own_origin(request):
            raise HttpError(403, "foreign_origin", _FOREIGN_ORIGIN)
        return session

    def check_link(self, request: HTTPConnection) -> Caller:
        """Return the rights for a new session. Raises HttpError for a session: it lasts 12 h."""
        if not (_peer_of(request).on_socket or self.has_token(request)):
            raise HttpError(403, "not_on_socket", "links are made on the daemon's socket")
        return self.check_captures(request)

    def check_captures(self, request: HTTPConnection) -> Caller:
        """Return the rights. Raises HttpError unless captures may be requested and read."""
        caller = caller_of(request)
        if not caller.captures:
            raise unauthorized(request)
        return caller

    def check_all_jobs(self, request: HTTPConnection, what: str) -> None:
        """Raise HttpError unless the caller may act for all jobs; ``what`` needs it."""
        if not self.check_captures(request).all_jobs:
            raise HttpError(403, "not_yours", f"{what} need the token or root")


def read_token(path: Path, key: str) -> bytes:
    """Return the token in the file, which ``key`` names. Raises UsageError."""
    try:
        token = path.read_bytes().strip()
    except OSError as error:
        raise UsageError(f"{key} {path}: {error.strerror}") from error
    if not token:
        raise UsageError(f"{key} {path} is empty; write the token into it")
    return token


def _peer_of(request: HTTPConnection) -> Peer:
    peer: Peer = request.scope.get("state", {}).get("peer") or Peer("")
    return peer


def has_own_origin(request: HTTPConnection) -> bool:
    """Return whether a browser sent it from our own page, also through a forwarded port."""
    host = request.headers.get("host", "")
    return bool(host) and request.headers.get("origin", "").partition("://")[2] == host


def caller_of(request: HTTPConnection) -> Caller:
    """Return the rights that the guard has left in the request's state."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


def unauthorized(request: HTTPConnection) -> HttpError:
    """Return the refusal of a request without any rights."""
    challenge = {"WWW-Authenticate": 'Bearer realm="warpwatch"'}
    has_token = request.headers.get("authorization", "").lower().startswith("bearer ")
    detail = _WRONG_TOKEN if has_token else _NEEDS_LOGIN
    return HttpError(401, "token_needed", detail, challenge)


# An answer may bring its own of each.
SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    # With no-referrer, browsers would hide the origin of our own forms, too.
    "referrer-policy": "same-origin",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
    "content-security-policy": "default-src 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Guard:
    """The middleware; the routes decide what an admitted request may see and do.

    count: receives the status of every answer. refuse: makes the answer to a request that was
    refused. prepare: fetches what an admitted request for a path may need of other processes.
    """

    app: ASGIApp = field(kw_only=False)
    access: Access
    basic_auth: BasicAuth | None
    count: Callable[[int], None]
    refuse: Callable[[HTTPConnection, HttpError], Response]
    prepare: Callable[[str], Awaitable[None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HTTPConnection(scope)
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
                self.count(message["status"])
            await send(message)

        try:
            await self._admit(request)
            if request.scope["path"] not in self.access.open:
                await self.prepare(request.scope["path"])
            await self.app(scope, receive, watched)
        except HttpError as error:
            await self.refuse(request, error)(scope, receive, watched)
        except (ClientGone, ClientDisconnect):
            raise ClientGone from None
        except Exception:
            logger.exception("a request for %.200r failed", scope["path"])
            if not begun:
                failure = HttpError(500, "internal", "the daemon failed; its log says how")
                await failure.answer()(scope, receive, watched)

    async def _admit(self, request: HTTPConnection) -> None:
        """Leave the caller's rights in the request's state. Raises HttpError to refuse it."""
        caller, path = await self.access.caller(request), request.scope["path"]
        if caller is None and self.basic_auth is not None and path not in (LIVENESS, LOGIN):
            await self.basic_auth.check(request.headers.get("authorization", ""))
            caller = Caller(all_jobs=True)
        if caller is None and path not in self.access.open:
            raise unauthorized(request)
        request.scope.setdefault("state", {})["caller"] = caller or Caller()
