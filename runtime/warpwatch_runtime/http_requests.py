"""Sends single HTTP requests: the certificate is verified, no redirect followed, no proxy used."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import http.client
    import ssl

TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1 << 20
JSON = {"Accept": "application/json", "Content-Type": "application/json"}


class RequestError(Exception):
    """A failed request, in one line without the URL, which may be a secret.

    status: the response's, if one came. is_protocol: the peer does not speak HTTP.
    """

    def __init__(self, text: str, status: int | None = None, is_protocol: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.is_protocol = is_protocol


class Answer(NamedTuple):
    status: int
    content: bytes

    @property
    def words(self) -> str:
        """The beginning of the content, in one line."""
        return " ".join(self.content[:200].decode("utf-8", "replace").split())


class Requests:
    """Sends requests to one server.

    ca_file: signs the server's certificate; None: the authorities that the system trusts.
    server_name: in the certificate; empty: the host of the URL.
    socket_path: a Unix socket to use instead of the host and port of the URL.
    """

    def __init__(
        self,
        ca_file: Path | None = None,
        *,
        server_name: str = "",
        socket_path: Path | None = None,
        timeout_s: float = TIMEOUT_S,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._ca_file = ca_file
        self._server_name = server_name
        self._socket_path = socket_path
        self._timeout_s = timeout_s
        self._max_answer_bytes = max_answer_bytes
        self._context: ssl.SSLContext | None = None

    def send(
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] = JSON
    ) -> Answer:
        """Return the response with any status. Raises RequestError."""
        import http.client

        try:
            parts = urlsplit(url)
            target = parts._replace(scheme="", netloc="", path=parts.path or "/", fragment="")
            connection = self._connection(parts.scheme, parts.hostname or "", parts.port)
            try:
                connection.request(method, target.geturl(), body, dict(headers))
                answer = connection.getresponse()
                content = answer.read(self._max_answer_bytes)
                if answer.length and len(content) < self._max_answer_bytes:
                    raise ConnectionResetError("the answer is cut short")
                return Answer(answer.status, content)
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            is_protocol = isinstance(error, http.client.HTTPException)
            is_protocol |= not isinstance(error, OSError)
            text = " ".join(str(error).split()) or type(error).__name__
            raise RequestError(text, is_protocol=is_protocol) from error

    def _connection(self, scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
        import http.client

        # Without brackets, the end of an IPv6 address would be taken for a port that is missing.
        # With a port, http.client before Python 3.13 does not take the brackets off.
        name = f"[{host}]" if ":" in host and port is None else host
        if self._socket_path is not None:
            connection = http.client.HTTPConnection("localhost")
            connection.sock = connect(self._socket_path, self._timeout_s)
        elif scheme != "https":
            connection = http.client.HTTPConnection(name, port, timeout=self._timeout_s)
        else:
            connection = http.client.HTTPSConnection(name, port)
            plain = socket.create_connection((host, connection.port), self._timeout_s)
            certified = self._server_name or host
            connection.sock = self.load_trust().wrap_socket(plain, server_hostname=certified)
        return connection

    def load_trust(self) -> ssl.SSLContext:
        """Return what certificates are verified with. Raises RequestError."""
        if self._context is None:
            import ssl

            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            try:
                if self._ca_file is None:
                    self._context.load_default_certs()
                else:
                    self._context.load_verify_locations(self._ca_file)
            except OSError as error:
                reason = error.strerror or error
                raise RequestError(f"ca_file {self._ca_file}: {reason}") from error
        return self._context


def connect(path: Path, timeout_s: float | None) -> socket.socket:
    """Connect to a Unix socket. Raises OSError."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(timeout_s)
        # The path of a socket may have 107 bytes at most: it goes by the folder's descriptor.
        connection.connect(f"/proc/self/fd/{folder}/{path.name}")
    except OSError:
        connection.close()
        raise
    finally:
        os.close(folder)
    return connection


def read_secret(path: Path) -> str:
    """Return the secret in a file, read each time to follow changes. Raises RequestError."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def read_headers(path: Path | None) -> dict[str, str]:
    """Return headers from lines ``Name: value``; # begins a comment. Raises RequestError."""
    lines = read_secret(path).splitlines() if path else []
    pairs = [line.partition(":") for line in lines if line.strip() and line.lstrip()[0] != "#"]
    if not all(separator and name.strip() for name, separator, _ in pairs):
        raise RequestError(f"{path}: each line must be a header, as `Name: value`")
    return {name.strip(): value.strip() for name, _, value in pairs}
