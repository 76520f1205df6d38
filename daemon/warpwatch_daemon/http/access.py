"""Who may change something, and who may read the files of captures.

A bearer token allows both. Without one, requests from this very machine are trusted as far as
they are seen to come from it: a browser that another site misuses (cross-site request, DNS
rebinding) and a reverse proxy are recognised by the headers that they cannot leave out.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from pathlib import Path

from starlette.requests import HTTPConnection

from warpwatch_daemon.config.sections import HttpConfig
from warpwatch_daemon.http.answers import ApiError
from warpwatch_telemetry.errors import UsageError

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


class Access:
    """``loopback``: whether the daemon listens on a loopback address."""

    def __init__(self, config: HttpConfig, *, loopback: bool) -> None:
        self._token = TokenFile(config.token_file) if config.token_file else None
        self._token_required = config.token_required
        self._loopback = loopback

    def has_token(self, request: HTTPConnection) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if self._token is None or scheme.lower() != "bearer":
            return False
        return self._token.matches(token.strip())

    def check_change(self, request: HTTPConnection) -> None:
        """Raises ApiError unless the request may change state."""
        if self.has_token(request):
            return
        if self._token is not None:
            raise _unauthorized("this needs the token of http.token_file")
        if self._token_required:
            raise ApiError(
                403, "token_needed", "http.token_required is on and http.token_file is not set"
            )
        distrust = self._distrust(request) or _foreign_origin(request)
        if distrust:
            raise ApiError(403, *distrust)

    def check_files(self, request: HTTPConnection) -> None:
        """Raises ApiError unless the request may read the files of captures."""
        if self.may_read_files(request):
            return
        if self._token is not None:
            raise _unauthorized("beyond loopback, files of captures need the token")
        reason, detail = self._distrust(request) or ("not_loopback", "")
        raise ApiError(403, reason, detail)

    def may_read_files(self, request: HTTPConnection) -> bool:
        return self._distrust(request) is None or self.has_token(request)

    def _distrust(self, request: HTTPConnection) -> tuple[str, str] | None:
        """Why a request without a token is not taken as one of this machine: reason, detail."""
        hint = "; set http.token_file and send the token"
        peer = request.client.host if request.client else ""
        if not self._loopback:
            return "not_loopback", f"the daemon listens beyond loopback{hint}"
        if not is_loopback(peer):
            return "not_loopback", f"the request comes from beyond loopback{hint}"
        if _forwarded(request):
            return "forwarded", f"the request came through a proxy{hint}"
        if not is_loopback(_host_name(request)):
            return "foreign_host", f"the Host header is no loopback name{hint}"
        return None


def is_loopback(host: str) -> bool:
    """Whether a host, by name or address, is this machine. Names are not looked up."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return bool((mapped or address).is_loopback)


def _host_name(request: HTTPConnection) -> str:
    match = _HOST.fullmatch(request.headers.get("host", ""))
    return match[1] if match else ""


def _forwarded(request: HTTPConnection) -> bool:
    return any(
        name in ("forwarded", "via", "x-real-ip") or name.startswith("x-forwarded")
        for name in request.headers
    )


def _foreign_origin(request: HTTPConnection) -> tuple[str, str] | None:
    origin = request.headers.get("origin")
    own = f"{request.scope['scheme']}://{request.headers.get('host', '')}"
    if origin is None or origin.lower() == own.lower():
        return None
    return "foreign_origin", "the request was sent by the page of another site"


def _unauthorized(detail: str) -> ApiError:
    return ApiError(
        401,
        "token_needed",
        f"{detail}: send it as `Authorization: Bearer …`",
        {"WWW-Authenticate": 'Bearer realm="warpwatch"'},
    )
