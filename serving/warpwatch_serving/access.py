"""Identity and permissions of requests: peers, the token, sessions and passwords.

No identity is guessed from addresses or from headers that a proxy sets.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import HTTPConnection

from warpwatch_devices.attribution.control_groups import read_owner
from warpwatch_serving.answers import HttpError
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.sessions import LINK_S, SESSION_S, Keys, cookie_name
from warpwatch_telemetry.errors import UsageError

_PROC = Path("/proc")
# struct ucred
_CREDENTIALS = struct.Struct("=iII")


@dataclass(frozen=True, slots=True)
class Peer:
    """The client that limits count by its name.

    uid: the user at the Unix socket, None if the kernel cannot name it, and over TCP. privileged:
    whether the user is root or the daemon's own. on_socket: whether it uses the Unix socket.
    """

    name: str
    uid: int | None = None
    privileged: bool = False
    on_socket: bool = False


def peer_of(request: HTTPConnection) -> Peer:
    """Return the peer that the connection has left in the request's state."""
    found = request.scope.get("state", {}).get("peer")
    if isinstance(found, Peer):
        return found
    return Peer(network(request.client.host) if request.client else "")


def identify(accepted: socket.socket) -> Peer:
    """Return the peer of an accepted socket. Raises OSError if it has closed it already."""
    if accepted.family != socket.AF_UNIX:
        return Peer(network(accepted.getpeername()[0]))
    raw = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(raw)
    # For a process of another user namespace the kernel reports the overflow UID. Root in a
    # container, or a user with the daemon's UID in one, is not that user of this machine.
    is_privileged = uid in (0, os.geteuid())
    if uid == _overflow_uid() or (is_privileged and not _is_of_this_machine(pid)):
        return Peer("unknown user", on_socket=True)
    return Peer(f"uid {uid}", uid, is_privileged, on_socket=True)


def _is_of_this_machine(pid: int, proc: Path = _PROC) -> bool:
    """Return whether the process is visible, and in no pod or in the daemon's own."""
    if pid <= 0:
        return False
    theirs, ours = read_owner(pid, "", proc), read_owner(os.getpid(), "", proc)
    if theirs is None:
        return False
    return not theirs.pod_uid or (ours is not None and theirs.pod_uid == ours.pod_uid)


def _overflow_uid() -> int:
    try:
        return int((_PROC / "sys/kernel/overflowuid").read_text())
    except (OSError, ValueError):
        return 65534


def network(host: str) -> str:
    """Return the name under which limits count an address.

    One host owns a whole /64 of IPv6 addresses, and this machine all of 127.0.0.0/8.
    """
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    address = getattr(address, "ipv4_mapped", None) or address
    if address.is_loopback:
        return "loopback"
    return str(ipaddress.ip_network((address, 64 if address.version == 6 else 32), strict=False))


LIVENESS, METRICS, LOGIN = "/healthz", "/metrics", "/login"
OPEN = frozenset({LIVENESS, "/readyz", METRICS, LOGIN})
# The owner of no job.
NO_OWNER = "none"

_UNKNOWN_ON_SOCKET = (
    "this process is in another user namespace, or root's in a container: use the token"
)
_NEEDS_LOGIN = (
    "over TCP this needs a session or the token: open the link that `warpwatch page` prints on the "
    "node, or send `Authorization: Bearer …` (--token-file FILE); commands on the node need "
    "neither without --url and WARPWATCH_URL"
)
_FOREIGN_ORIGIN = (
    "a session changes something only from its own page: the header Origin has another address"
)


class TokenFile:
    """The token in a file, which may be replaced at any time. Raises UsageError at first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            is_empty = not self._read()
        except OSError as error:
            raise UsageError(f"http.token_file {path}: {error.strerror}") from error
        if is_empty:
            raise UsageError(f"http.token_file {path} is empty; write the token into it")

    def matches(self, token: str) -> bool:
        """Return whether this is the token; an unreadable or empty file matches nothing."""
        try:
            known = self._read()
        except OSError:
            return False
        return bool(known) and hmac.compare_digest(token.encode("utf-8", "surrogateescape"), known)

    def _read(self) -> bytes:
        return self._path.read_bytes().strip()


@dataclass(frozen=True, slots=True)
class Caller:
    """The rights of a request.

    uid: the user whose jobs are visible and may be captured. all_jobs: whether everybody's are.
    files: whether the files of captures may be read. changes: whether captures may be requested.
    """

    uid: int | None = None
    all_jobs: bool = False
    files: bool = False
    changes: bool = False

    @property
    def owner(self) -> str | None:
        """The only owner whose jobs are visible: NO_OWNER without a user, None for all owners."""
        if self.all_jobs:
            return None
        return NO_OWNER if self.uid is None else f"uid/{self.uid}"


HOLDER_OF_TOKEN = Caller(all_jobs=True, files=True, changes=True)


class Access:
    """Finds the rights of a request. Raises UsageError if the token file cannot be used."""

    def __init__(self, config: HttpConfig, monotonic: Callable[[], float]) -> None:
        if config.metrics_token and config.token_file is None:
            raise UsageError("metrics_token: token_file is needed, too")
        self.token = TokenFile(config.token_file) if config.token_file else None
        # Open to everybody: a probe has no password, and the login comes before the rights.
        self.open = OPEN - {METRICS} if config.metrics_token else OPEN
        self.links: Keys[Caller] = Keys(LINK_S, monotonic)
        self.sessions: Keys[Caller] = Keys(SESSION_S, monotonic)
        self.cookie = cookie_name(f"{socket.gethostname()} {config.listen}")

    def is_token(self, token: str) -> bool:
        """Return whether this is the configured token."""
        return self.token is not None and self.token.matches(token.strip())

    def has_token(self, request: HTTPConnection) -> bool:
        """Return whether the token comes with the request."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and self.is_token(token)

    def caller(self, request: HTTPConnection) -> Caller | None:
        """Return the rights, None if there are none. Raises HttpError if they do not suffice."""
        if self.has_token(request):
            return HOLDER_OF_TOKEN
        peer = peer_of(request)
        if peer.on_socket:
            if peer.uid is None and request.url.path not in self.open:
                raise HttpError(403, "unknown_user", _UNKNOWN_ON_SOCKET)
            return Caller(peer.uid, peer.privileged, files=True, changes=True)
        session = self.sessions.find(request.cookies.get(self.cookie, ""))
        changes = request.scope["method"] not in ("GET", "HEAD")
        if session and changes and not has_own_origin(request):
            raise HttpError(403, "foreign_origin", _FOREIGN_ORIGIN)
        return session

    def check_link(self, request: HTTPConnection) -> Caller:
        """Return the rights for a new session. Raises HttpError for a session: it lasts 12 h."""
        if not (peer_of(request).on_socket or self.has_token(request)):
            raise HttpError(403, "not_on_socket", "links are made on the daemon's socket")
        return self.check_change(request)

    def check_change(self, request: HTTPConnection) -> Caller:
        """Return the rights. Raises HttpError unless the caller may change something."""
        caller = caller_of(request)
        if not caller.changes:
            raise unauthorized()
        return caller

    def check_all_jobs(self, request: HTTPConnection, what: str) -> None:
        """Raise HttpError unless the caller may act for all jobs; ``what`` needs it."""
        if not self.check_change(request).all_jobs:
            raise HttpError(403, "not_yours", f"{what} need the token or root")

    def check_files(self, request: HTTPConnection) -> Caller:
        """Return the rights. Raises HttpError unless files of captures may be read."""
        caller = caller_of(request)
        if not caller.files:
            raise unauthorized()
        return caller


def has_own_origin(request: HTTPConnection) -> bool:
    """Return whether a browser sent it from our own page, also through a forwarded port."""
    host = request.headers.get("host", "")
    return bool(host) and request.headers.get("origin", "").partition("://")[2] == host


def caller_of(request: HTTPConnection) -> Caller:
    """Return the rights that the guard has left in the request's state."""
    caller = request.scope["state"]["caller"]
    assert isinstance(caller, Caller)
    return caller


def unauthorized() -> HttpError:
    """Return the refusal of a request without any rights."""
    challenge = {"WWW-Authenticate": 'Bearer realm="warpwatch"'}
    return HttpError(401, "token_needed", _NEEDS_LOGIN, challenge)
