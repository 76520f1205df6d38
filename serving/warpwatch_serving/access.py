"""Who asks, and what they may.

Over TCP a bearer token allows everything. Where none is configured, requests from this very
machine may read what is their user's, as far as they are seen to come from it: a browser that
another site misuses (DNS rebinding) and a reverse proxy are recognised by the headers that they
cannot leave out.
On the Unix socket the kernel says who asks.
"""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, replace
from pathlib import Path

from starlette.requests import HTTPConnection

from warpwatch_serving.answers import ApiError
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.peer import Peer, is_loopback, peer_of
from warpwatch_telemetry.anomalies import DEVICE_KINDS, Anomaly
from warpwatch_telemetry.errors import UsageError
from warpwatch_telemetry.state import State

PERFETTO_ORIGIN = "https://ui.perfetto.dev"
# Open to everybody: a probe has no password.
PROBES = ("/healthz", "/readyz")
METRICS = "/metrics"
# The owner of no job.
NO_OWNER = "none"

_UNKNOWN_ON_SOCKET = (
    "this process is in another user namespace, or root's in a container: ask with the token"
)
_NO_CHANGES = (
    "over TCP this needs a token, and http.token_file is not set; ask through the daemon's socket, "
    "as `warpwatch capture` does without --url and WARPWATCH_URL"
)
_NEEDS_TOKEN = (
    "this needs the token of http.token_file (--token-file), or the daemon's socket on its node"
)
_HOST = re.compile(r"(\[[^\]]+\]|[^:]+)(?::\d+)?")


class TokenFile:
    """The token in a file, read again when the file has changed. Raises UsageError at first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, ...] = ()
        self._token = b""
        try:
            self._refresh()
        except OSError as error:
            raise UsageError(f"http.token_file {path}: {error.strerror}") from error
        if not self._token:
            raise UsageError(f"http.token_file {path} is empty; write the token into it")

    def matches(self, token: str) -> bool:
        """An unreadable or empty file matches nothing."""
        try:
            self._refresh()
        except OSError:
            return False
        given = token.encode("utf-8", "surrogateescape")
        return bool(self._token) and hmac.compare_digest(given, self._token)

    def _refresh(self) -> None:
        status = self._path.stat()
        version = (status.st_mtime_ns, status.st_size, status.st_ino)
        if version != self._version:
            self._token = self._path.read_bytes().strip()
            self._version = version


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. uid: of the user, whose jobs are seen and captured; ``all_jobs``: everybody's are.

    files: whether the files of captures may be read; changes: whether captures may be asked for.
    """

    uid: int | None = None
    all_jobs: bool = False
    files: bool = False
    changes: bool = False

    @property
    def owner(self) -> str | None:
        """Whose jobs alone are seen, NO_OWNER without a user, None for everybody's."""
        if self.all_jobs:
            return None
        return NO_OWNER if self.uid is None else f"uid/{self.uid}"


class Access:
    """``loopback``: whether the daemon listens on a loopback address. Raises UsageError."""

    def __init__(self, config: HttpConfig, *, loopback: bool) -> None:
        if config.metrics_token and config.token_file is None:
            raise UsageError("http.metrics_token: http.token_file is needed, too")
        self._token = TokenFile(config.token_file) if config.token_file else None
        self._open = PROBES if config.metrics_token else (*PROBES, METRICS)
        self._loopback = loopback

    def has_token(self, request: HTTPConnection) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if self._token is None or scheme.lower() != "bearer":
            return False
        return self._token.matches(token.strip())

    def caller(self, request: HTTPConnection, *, has_password: bool) -> Caller:
        """Raises ApiError for who may read nothing. ``has_password``: of basic authentication."""
        if self.has_token(request):
            return Caller(all_jobs=True, files=True, changes=True)
        if request.url.path in self._open:
            return Caller()
        peer = peer_of(request)
        if peer.on_socket:
            if peer.uid is None:
                raise ApiError(403, "unknown_user", _UNKNOWN_ON_SOCKET)
            return Caller(peer.uid, peer.privileged, files=True, changes=True)
        if has_password:
            return Caller(all_jobs=True)
        if self._token is not None:
            raise _unauthorized(_NEEDS_TOKEN)
        distrust = self._distrust(request, peer)
        if distrust:
            raise ApiError(403, *distrust)
        return Caller(peer.uid, peer.privileged, files=True)

    def check_change(self, request: HTTPConnection) -> Caller:
        """Who asks, as the guard has found. Raises ApiError unless they may change something."""
        caller = caller_of(request)
        if not caller.changes:
            if self._token is not None:
                raise _unauthorized(_NEEDS_TOKEN)
            raise ApiError(403, "token_needed", _NO_CHANGES)
        return caller

    def check_all_jobs(self, request: HTTPConnection, what: str) -> None:
        """Raises ApiError unless they may act for all jobs; ``what`` needs it."""
        if not self.check_change(request).all_jobs:
            raise ApiError(403, "not_yours", f"{what} need the token or root")

    def check_files(self, request: HTTPConnection) -> Caller:
        """Who asks. Raises ApiError unless they may read files of captures."""
        caller = caller_of(request)
        if not caller.files:
            raise _unauthorized(_NEEDS_TOKEN)
        return caller

    def _distrust(self, request: HTTPConnection, peer: Peer) -> tuple[str, str] | None:
        """Why a request without a token is not taken as one of this machine: reason, detail."""
        hint = "; set http.token_file and send the token, or ask through the daemon's socket"
        address = request.client.host if request.client else ""
        if not self._loopback:
            return "not_loopback", f"the daemon listens beyond loopback{hint}"
        if not is_loopback(address):
            return "not_loopback", f"the request comes from beyond loopback{hint}"
        if _forwarded(request):
            return "forwarded", f"the request came through a proxy{hint}"
        if not is_loopback(_host_name(request)):
            return "foreign_host", f"the Host header is no loopback name{hint}"
        if _foreign_origin(request):
            return "foreign_origin", "the request was sent by the page of another site"
        if peer.uid is None:
            return "unknown_user", f"whose this connection is cannot be known{hint}"
        return None


def caller_of(request: HTTPConnection) -> Caller:
    """As the guard has left it."""
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def _host_name(request: HTTPConnection) -> str:
    match = _HOST.fullmatch(request.headers.get("host", ""))
    return match[1] if match else ""


def _forwarded(request: HTTPConnection) -> bool:
    return any(
        name in ("forwarded", "via", "x-real-ip") or name.startswith("x-forwarded")
        for name in request.headers
    )


def _foreign_origin(request: HTTPConnection) -> bool:
    origin = request.headers.get("origin")
    own = f"{request.scope['scheme']}://{request.headers.get('host', '')}"
    if origin is None or origin.lower() == own.lower():
        return False
    # It may read traces: their answers say so.
    return not (origin == PERFETTO_ORIGIN and request.url.path.startswith("/api/v1/captures/"))


def _unauthorized(detail: str) -> ApiError:
    return ApiError(
        401,
        "token_needed",
        f"{detail}: send it as `Authorization: Bearer …`",
        {"WWW-Authenticate": 'Bearer realm="warpwatch"'},
    )


def visible(state: State, owner: str | None) -> State:
    """``owner``: of http.access.Caller."""
    if owner is None:
        return state
    anomalies = tuple(one for one in state.anomalies if may_see(one, owner))
    shown = {anomaly.id for anomaly in anomalies}
    return replace(
        state,
        ranks=tuple(rank for rank in state.ranks if rank.owner == owner),
        jobs=tuple(job for job in state.jobs if job.owner == owner),
        anomalies=anomalies,
        contexts={ident: one for ident, one in state.contexts.items() if ident in shown},
        captures=tuple(one for one in state.captures if one.request.owner == owner),
        sensitivities=tuple(sight for sight in state.sensitivities if sight.owner == owner),
        decisions=tuple(one for one in state.decisions if one.anomaly_id in shown),
    )


def may_see(anomaly: Anomaly, owner: str) -> bool:
    """Of a device, or of a job of this owner."""
    return anomaly.kind in DEVICE_KINDS or anomaly.owner == owner
