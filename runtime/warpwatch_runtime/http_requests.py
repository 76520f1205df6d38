"""One HTTP request to somebody else's server: its certificate verified, no redirect followed."""

from __future__ import annotations

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
    """In one line, without the URL, which may be a secret. status: None where none came."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Answer(NamedTuple):
    status: int
    content: bytes

    @property
    def words(self) -> str:
        """The beginning of what it says, in one line."""
        return " ".join(self.content[:200].decode("utf-8", "replace").split())


class Requests:
    """``ca_file``: who signs the server's certificate, None for those whom the system trusts."""

    def __init__(self, ca_file: Path | None = None) -> None:
        self._ca_file = ca_file
        self._context: ssl.SSLContext | None = None

    def send(
        self, method: str, url: str, body: bytes | None = None, headers: Mapping[str, str] = JSON
    ) -> Answer:
        """Whatever status it has. May wait for TIMEOUT_S. Raises RequestError."""
        import http.client

        parts = urlsplit(url)
        path = parts._replace(scheme="", netloc="", fragment="").geturl() or "/"
        try:
            connection = self._connection(parts.scheme, parts.hostname or "", parts.port)
            try:
                connection.request(method, path, body, dict(headers))
                answer = connection.getresponse()
                return Answer(answer.status, answer.read(MAX_ANSWER_BYTES))
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise RequestError(str(error) or type(error).__name__) from error

    def _connection(self, scheme: str, host: str, port: int | None) -> http.client.HTTPConnection:
        import http.client

        if scheme != "https":
            return http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
        if self._context is None:
            import ssl

            try:
                self._context = ssl.create_default_context(cafile=self._ca_file)
            except OSError as error:
                raise RequestError(f"ca_file {self._ca_file}: {error}") from error
        return http.client.HTTPSConnection(host, port, timeout=TIMEOUT_S, context=self._context)


def read_secret(path: Path) -> str:
    """Read each time, so that a new one is taken up. Raises RequestError."""
    try:
        return path.read_text().strip()
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def read_headers(path: Path | None) -> dict[str, str]:
    """``Name: value``, one a line; # begins a comment. Raises RequestError."""
    lines = read_secret(path).splitlines() if path else []
    pairs = [line.partition(":") for line in lines if line.strip() and line.lstrip()[0] != "#"]
    if not all(separator and name.strip() for name, separator, _ in pairs):
        raise RequestError(f"{path}: each line is to be a header, as `Name: value`")
    return {name.strip(): value.strip() for name, _, value in pairs}
