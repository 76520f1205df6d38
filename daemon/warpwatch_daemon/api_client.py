"""Finds the daemon of this machine by its socket, and sends requests to the API of any daemon."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from warpwatch import rendezvous
from warpwatch_runtime.http_requests import RequestError, Requests, connect, read_secret
from warpwatch_telemetry import clean_text
from warpwatch_telemetry.errors import Refused, UsageError, WarpwatchError

CONNECT_TIMEOUT_S = 2.0
# The default address of a daemon.
DEFAULT_URL = "http://127.0.0.1:9400"


# The names of sockets, which lie beside the rendezvous folder, since pods mount the folder itself.
DAEMON, FLEET = "api", "fleet-api"


def socket_path(folder: Path, server: str = DAEMON) -> Path:
    """Return the socket of the daemon, or of a fleet, beside this rendezvous folder."""
    return folder.with_name(f"{folder.name}-{server}") / "api.sock"


def find_socket(environ: Mapping[str, str], uid: int, server: str = DAEMON) -> Path | None:
    """Return the socket of the daemon that trainings of this user find, or None.

    Its folder must belong to root or this user, so that no other user can replace the daemon.
    """
    paths = (
        socket_path(Path(folder.path), server) for folder in rendezvous.candidates(environ, uid)
    )
    return next((path for path in paths if _is_served(path, uid)), None)


def _is_served(path: Path, uid: int) -> bool:
    try:
        if path.parent.lstat().st_uid not in (0, uid):
            return False
        connect(path, CONNECT_TIMEOUT_S).close()
    except OSError:
        return False
    return True


TIMEOUT_S = 10.0
# Reasons why a daemon does not speak HTTP with us.
_PROTECTED = {
    "http:": "it has TLS: use https:// and --ca-file",
    "https": "it requires a client certificate: ask it on its node, through its socket",
}
# Jobs of thousands of ranks.
MAX_ANSWER_BYTES = 256 << 20


class ApiClient:
    """The API of a daemon or fleet, over HTTP or its Unix socket.

    token_file: the bearer token that a daemon wants over TCP.
    socket_path: its Unix socket, used instead of ``url``; ``shown_url`` leads a person to the API.
    ca_file, server_name: as of Requests. Raises UsageError for a file that cannot be used.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        token_file: Path | None = None,
        *,
        ca_file: Path | None = None,
        server_name: str = "",
        socket_path: Path | None = None,
    ) -> None:
        if not is_address(url):
            raise UsageError(f"--url {url!r} is not an http:// or https:// address")
        self.url = self.where = self.shown_url = url.rstrip("/")
        self._token = _read_token(token_file)
        self._socket_path = socket_path
        self._requests = Requests(
            ca_file, server_name=server_name, socket_path=socket_path,
            timeout_s=TIMEOUT_S, max_answer_bytes=MAX_ANSWER_BYTES,
        )  # fmt: skip
        if url.startswith("https://"):
            try:
                self._requests.load_trust()
            except RequestError as error:
                raise UsageError(str(error).replace("ca_file", "--ca-file", 1)) from error
        elif token_file is not None and socket_path is None:
            _check_listener(url, token_file)
        if socket_path is not None:
            self.where = str(socket_path)
            self.shown_url = f"curl --unix-socket {socket_path} http://localhost"

    @property
    def is_local(self) -> bool:
        """Whether it asks the daemon of this machine, through its socket."""
        return self._socket_path is not None

    def get(self, path: str, *, accepted: int = 200) -> Any:
        """Return the JSON of the response, also of one with the status ``accepted``.

        Raises WarpwatchError if there is no daemon.
        """
        return self._send("GET", path, accepted=accepted)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Return the JSON of the response. Raises Refused with the daemon's reason."""
        return self._send("POST", path, json.dumps(body).encode())

    def _send(self, method: str, path: str, body: bytes | None = None, accepted: int = 200) -> Any:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        stranger = WarpwatchError(f"the server at {self.where} is not a warpwatch daemon")
        try:
            answer = self._requests.send(method, self.url + path, body, headers)
        except RequestError as error:
            if error.is_protocol and not self.is_local:
                raise WarpwatchError(f"{stranger}, or {_PROTECTED[self.url[:5]]}") from error
            if error.is_protocol:
                raise stranger from error
            raise WarpwatchError(
                f"no daemon answers at {self.where} ({error}); start one with `warpwatch daemon` "
                "or name it with --url"
            ) from error
        if not 200 <= answer.status < 300 and answer.status != accepted:
            raise _refusal(answer.status, answer.content)
        try:
            return clean_text.load(answer.content)
        except ValueError as error:
            raise stranger from error


def is_url_of(path: Path, url: str) -> bool:
    """Return whether the daemon at this socket is the one that the URL names.

    It is if the URL has the port on which that daemon listens and an address of this machine.
    """
    try:
        address = urlsplit(url)
        if address.port is None or not _is_here(address.hostname or ""):
            return False
        found: bool = ApiClient(socket_path=path).get("/healthz").get("port") == address.port
        return found
    except (WarpwatchError, ValueError):
        return False


def is_address(url: str) -> bool:
    """Return whether this is an http:// or https:// address with a port that can be."""
    try:
        return url.startswith(("http://", "https://")) and urlsplit(url).port != 0
    except ValueError:
        return False


def _is_here(host: str) -> bool:
    """Return whether one of the host's addresses is this machine's: others cannot be bound."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.bind(address)
                return True
    return False


def _refusal(code: int, content: bytes) -> WarpwatchError:
    try:
        error = clean_text.load(content)["error"]
        return Refused(str(error["reason"]), str(error["detail"]))
    except (ValueError, KeyError, TypeError):
        return WarpwatchError(f"the daemon answered {code}")


def _check_listener(url: str, token_file: Path) -> None:
    """Raise UsageError if a token would go to a stranger, or over a network in plain text.

    Any user may have taken a port that is not privileged. Trusted are root, the user of this
    process, as with `ssh -L` and `kubectl port-forward`, and the owner of the file, who has the
    token anyway.
    """
    address = urlsplit(url)
    port = address.port or 80
    if not _is_here(address.hostname or ""):
        raise UsageError(
            f"a token goes to {address.hostname} only over TLS: use https:// (with --ca-file), "
            "or a port that `ssh -L` or `kubectl port-forward` opens on this machine"
        )
    strangers = listeners(port) - {0, os.geteuid(), token_file.stat().st_uid}
    if strangers:
        raise UsageError(
            f"uid {min(strangers)} listens on port {port}, not root, you or the owner of "
            f"{token_file}: the token was not sent; use https:// with --ca-file"
        )


def listeners(port: int) -> set[int]:
    """Return the UIDs of the processes that listen on this TCP port of this machine.

    The columns are those of proc_net_tcp(5): the second is the local address, the fourth the state
    (0A is LISTEN), the eighth the UID.
    """
    found = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    found.add(int(fields[7]))
    return found


def _read_token(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        token = read_secret(path)
    except RequestError as error:
        raise UsageError(f"--token-file {error}") from error
    if not (token.isascii() and token.isprintable()):
        raise UsageError(f"--token-file {path}: a token is one line of ASCII text")
    return token
