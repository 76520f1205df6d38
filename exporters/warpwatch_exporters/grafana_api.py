"""Grafana's annotations over HTTP: find, create, update.

The API: https://grafana.com/docs/grafana/latest/developers/http_api/annotations/
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from warpwatch_runtime.http_requests import JSON, RequestError, Requests, read_secret

PATH = "/api/annotations"


class StoredAnnotation(NamedTuple):
    """An annotation as Grafana has it. Times are wall clock in ms, equal where it is no region."""

    id: int
    time_ms: int
    end_ms: int


class GrafanaApi:
    """``url``: of Grafana; ``token_file``: read for each request, so that a new token is taken up.

    ``ca_file``: who signs its certificate, None for the authorities that the system trusts.
    Every method may wait for http_requests.TIMEOUT_S and raises RequestError.
    """

    def __init__(self, url: str, token_file: Path | None, ca_file: Path | None = None) -> None:
        self._url = url.rstrip("/") + PATH
        self._token_file = token_file
        self._requests = Requests(ca_file)

    def find(self, tags: Sequence[str]) -> StoredAnnotation | None:
        """An annotation that has all of the tags."""
        query = [("type", "annotation"), ("limit", "1"), *(("tags", tag) for tag in tags)]
        found = self._send("GET", f"?{urlencode(query)}")
        try:
            return StoredAnnotation(*(int(found[0][key]) for key in ("id", "time", "timeEnd")))
        except IndexError:
            return None
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError("what answers is no Grafana") from error

    def create(self, annotation: Mapping[str, Any]) -> int:
        """Its id."""
        created = self._send("POST", "", annotation)
        try:
            return int(created["id"])
        except (KeyError, TypeError, ValueError) as error:
            raise RequestError("what answers is no Grafana") from error

    def update(self, ident: int, changes: Mapping[str, Any]) -> None:
        self._send("PATCH", f"/{ident}", changes)

    def _send(self, method: str, path: str, document: Mapping[str, Any] | None = None) -> Any:
        body = None if document is None else json.dumps(document).encode()
        token = {}
        if self._token_file is not None:
            token = {"Authorization": f"Bearer {read_secret(self._token_file)}"}
        answer = self._requests.send(method, self._url + path, body, JSON | token)
        if answer.status != 200:
            raise RequestError(
                f"{method} is answered with {answer.status}: {answer.words}", answer.status
            )
        try:
            return json.loads(answer.content)
        except (ValueError, RecursionError) as error:
            raise RequestError("what answers is no Grafana") from error
