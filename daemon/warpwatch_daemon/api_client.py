"""Talking to a running daemon: what the commands use."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from warpwatch_daemon import api_socket
from warpwatch_telemetry import clean_text
from warpwatch_telemetry.errors import Refused, UsageError, WarpwatchError

TIMEOUT_S = 10.0


class ApiClient:
    """``token_file`` holds the bearer token that a daemon asks for over TCP.

    With ``socket_path`` it is asked through its Unix socket, whatever ``url`` says; ``shown_url``
    is what leads a person to a path of the API. Over HTTPS the certificate must be signed by
    ``ca_file``, else by whom the system trusts, and be of ``server_name``, else of the URL's own
    host. No proxy is asked and no redirect followed. Raises UsageError for a file that is none.
    """

    def __init__(
        self,
        url: str = api_socket.DEFAULT_URL,
        token_file: Path | None = None,
        *,
        ca_file: Path | None = None,
        server_name: str = "",
        socket_path: Path | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise UsageError(f"--url {url!r} is no http:// or https:// address")
        self.url = self.where = self.shown_url = url.rstrip("/")
        self._token = _read_token(token_file)
        self._trust = _trust(ca_file, server_name) if url.startswith("https://") else None
        self._socket_path = socket_path
        if token_file is not None and self._trust is None and socket_path is None:
            _check_listener(url, token_file)
        if socket_path is not None:
            self.where = str(socket_path)
            self.shown_url = f"curl --unix-socket {socket_path} http://localhost"

    @property
    def is_local(self) -> bool:
        """Whether it asks the daemon of this machine, through its socket."""
        return self._socket_path is not None

    def get(self, path: str, *, accepted: int = 200) -> Any:
        """The JSON answer, also one of the status ``accepted``.

        Raises WarpwatchError when there is no daemon.
        """
        return self._send("GET", path, accepted=accepted)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """The JSON answer. Raises Refused with the daemon's reason."""
        return self._send("POST", path, json.dumps(body).encode())

    def _send(self, method: str, path: str, body: bytes | None = None, accepted: int = 200) -> Any:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            connection = self._connection()
            try:
                connection.request(method, urlsplit(self.url).path + path, body, headers)
                answer = connection.getresponse()
                content = answer.read()
            finally:
                connection.close()
            if not 200 <= answer.status < 300 and answer.status != accepted:
                raise _refusal(answer.status, content)
            return clean_text.load(content)
        except (OSError, ValueError, http.client.HTTPException) as error:
            # A certificate that is refused is a ValueError as well.
            if not isinstance(error, OSError) or isinstance(error, http.client.HTTPException):
                said = f"what answers at {self.where} is no warpwatch daemon"
                raise WarpwatchError(said) from error
            raise WarpwatchError(
                f"no daemon answers at {self.where} ({error}); start one with `warpwatch daemon` "
                "or name it with --url"
            ) from error

    def _connection(self) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        host, port = address.hostname or "", address.port
        if self._socket_path is not None:
            return _SocketConnection(self._socket_path)
        if self._trust is not None:
            return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=self._trust)
        return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)


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


def _is_here(host: str) -> bool:
    """Return whether one of the host's addresses is this machine's: others cannot be bound."""
    with contextlib.suppress(OSError):
        for family, kind, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind) as probe, contextlib.suppress(OSError):
                probe.bind(address)
                return True
    return False


class _SocketConnection(http.client.HTTPConnection):
    """HTTP through a Unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = api_socket.connect(self._path, self.timeout)


class _Trust(ssl.SSLContext):
    """The certificate is of a name, the connection may go to one of its addresses."""

    server_name = ""

    def wrap_socket(self, *arguments: Any, **options: Any) -> ssl.SSLSocket:
        if self.server_name:
            options["server_hostname"] = self.server_name
        return super().wrap_socket(*arguments, **options)


def _trust(ca_file: Path | None, server_name: str) -> ssl.SSLContext:
    trust = _Trust(ssl.PROTOCOL_TLS_CLIENT)
    trust.server_name = server_name
    try:
        if ca_file is None:
            trust.load_default_certs()
        else:
            trust.load_verify_locations(ca_file)
    except OSError as error:
        raise UsageError(f"--ca-file {ca_file}: {error.strerror or error}") from error
    return trust


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
    """Return the UIDs of those who listen on this TCP port of this machine.

    Of proc_net_tcp(5): the second column is the local address, the fourth the state, 0A is
    LISTEN, the eighth the UID.
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
        return path.read_text().strip()
    except OSError as error:
        raise UsageError(f"--token-file {path}: {error.strerror}") from error
