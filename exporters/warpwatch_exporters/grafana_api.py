"""Grafana's annotations over HTTP: find, create, update.

The API: https://grafana.com/docs/grafana/latest/developers/http_api/annotations/
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlencode, urlsplit

if TYPE_CHECKING:
    import http.client
    import ssl

PATH = "/api/annotations"
TIMEOUT_S = 5.0
MAX_ANSWER_BYTES = 1 << 20


class GrafanaError(Exception):
    """In one line. status: what Grafana answered, None where it did not."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class StoredAnnotation(NamedTuple):
    """An annotation as Grafana has it. Times are wall clock in ms, equal where it is no region."""

    id: int
    time_ms: int
    end_ms: int


class GrafanaApi:
    """``url``: of Grafana; ``token_file``: read for each request, so that a new token is taken up.

    ``ca_file``: who signs its certificate, None for the authorities that the system trusts.
    Every method may wait for TIMEOUT_S and raises GrafanaError.
    """

    def __init__(self, url: str, token_file: Path | None, ca_file: Path | None = None) -> None:
        parts = urlsplit(url)
        self._tls = parts.scheme == "https"
        self._host = parts.hostname or ""
        self._port = parts.port
        self._path = parts.path.rstrip("/") + PATH
        self._token_file = token_file
        self._ca_file = ca_file
        self._context: ssl.SSLContext | None = None

    def find(self, tags: Sequence[str]) -> StoredAnnotation | None:
        """An annotation that has all of the tags."""
        query = [("type", "annotation"), ("limit", "1"), *(("tags", tag) for tag in tags)]
        found = self._send("GET", f"{self._path}?{urlencode(query)}")
        try:
            return StoredAnnotation(*(int(found[0][key]) for key in ("id", "time", "timeEnd")))
        except IndexError:
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise GrafanaError("what answers is no Grafana") from error

    def create(self, annotation: Mapping[str, Any]) -> int:
        """Its id."""
        created = self._send("POST", self._path, annotation)
        try:
            return int(created["id"])
        except (KeyError, TypeError, ValueError) as error:
            raise GrafanaError("what answers is no Grafana") from error

    def update(self, ident: int, changes: Mapping[str, Any]) -> None:
        self._send("PATCH", f"{self._path}/{ident}", changes)

    def _send(self, method: str, path: str, document: Mapping[str, Any] | None = None) -> Any:
        import http.client

        body = None if document is None else json.dumps(document).encode()
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        try:
            connection = self._connection()
            try:
                connection.request(method, path, body, headers | self._token())
                answer = connection.getresponse()
                content = answer.read(MAX_ANSWER_BYTES)
            finally:
                connection.close()
        except (OSError, http.client.HTTPException) as error:
            raise GrafanaError(str(error) or type(error).__name__) from error
        if answer.status != 200:
            said = " ".join(content[:200].decode("utf-8", "replace").split())
            raise GrafanaError(f"{method} is answered with {answer.status}: {said}", answer.status)
        try:
            return json.loads(content)
        except (ValueError, RecursionError) as error:
            raise GrafanaError("what answers is no Grafana") from error

    def _connection(self) -> http.client.HTTPConnection:
        import http.client

        if not self._tls:
            return http.client.HTTPConnection(self._host, self._port, timeout=TIMEOUT_S)
        if self._context is None:
            self._context = self._trusting()
        return http.client.HTTPSConnection(
            self._host, self._port, timeout=TIMEOUT_S, context=self._context
        )

    def _trusting(self) -> ssl.SSLContext:
        import ssl

        try:
            return ssl.create_default_context(cafile=self._ca_file)
        except OSError as error:
            raise GrafanaError(f"exporters.grafana.ca_file: {error}") from error

    def _token(self) -> dict[str, str]:
        if self._token_file is None:
            return {}
        try:
            return {"Authorization": f"Bearer {self._token_file.read_text().strip()}"}
        except (OSError, ValueError) as error:
            raise GrafanaError(f"exporters.grafana.token_file: {error}") from error
