"""Grafana's annotations API, written from its published schema, and as strict.

https://grafana.com/docs/grafana/latest/developers/http_api/annotations/
"""

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.exporters.receiver import Answer, http_server

TOKEN = "glsa_right"
PATH = "/api/annotations"
# The largest of all tags together that Grafana's default configuration takes, as JSON.
MAX_TAGS_LENGTH = 500
# The columns of Grafana's table of tags.
MAX_TAG_PART = 100
_KEYS = {"time": int, "timeEnd": int, "tags": list, "text": str}


class GrafanaStandIn:
    """annotations: by id. requests: method and path of each.

    prefix: where Grafana is served. status: answered to everything, where not None; fail_text: what
    it cannot save, as it answers 500; refuse_text: what it refuses; lose_answers: the methods that
    are carried out, and the connection closed without an answer.
    """

    def __init__(self, prefix: str = "") -> None:
        self.annotations: dict[int, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.prefix = prefix
        self.token = TOKEN
        self.status: int | None = None
        self.fail_text = ""
        self.refuse_text = ""
        self.lose_answers: tuple[str, ...] = ()
        self.url = ""

    def only(self) -> dict[str, Any]:
        (annotation,) = self.annotations.values()
        return annotation

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> Answer:
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        self.requests.append(f"{method} {path}")
        status, document = self._status_and_document(method, path, query, headers, body)
        if method in self.lose_answers:
            return None
        return status, {"Content-Type": "application/json"}, json.dumps(document).encode()

    def _status_and_document(
        self, method: str, path: str, query: dict[str, list[str]], headers: Any, body: bytes
    ) -> tuple[int, Any]:
        if self.status is not None:
            return self.status, {"message": "as the test wants it"}
        if headers.get("Authorization") != f"Bearer {self.token}":
            return 401, {"message": "Invalid API key"}
        rest = path.removeprefix(self.prefix + PATH)
        if rest == path:
            return 404, {"message": "Not found"}
        if method == "GET" and not rest:
            return 200, self._find(query)
        assert headers["Content-Type"] == "application/json"
        document = json.loads(body)
        problem = _problem(document, partial=method == "PATCH")
        if problem or (self.refuse_text and self.refuse_text in document.get("text", "")):
            return 400, {"message": problem or "Failed to save annotation"}
        if self.fail_text and self.fail_text in document.get("text", ""):
            return 500, {"message": "Failed to save annotation"}
        return self._save(method, rest, document)

    def _find(self, query: dict[str, list[str]]) -> list[dict[str, Any]]:
        assert set(query) <= {"from", "to", "tags", "limit", "type", "matchAny"}
        assert query.get("type", ["annotation"]) == ["annotation"]
        found = [
            {"id": ident, "alertId": 0, "dashboardId": 0, "panelId": 0, **annotation}
            for ident, annotation in self.annotations.items()
            if set(query.get("tags", [])) <= set(annotation["tags"])
        ]
        return found[: int(query.get("limit", ["100"])[0])]

    def _save(self, method: str, rest: str, document: dict[str, Any]) -> tuple[int, Any]:
        if method == "POST" and not rest:
            ident = len(self.annotations) + 1
            # Without an end there is a point, and both times are the same.
            self.annotations[ident] = {"timeEnd": document["time"], **document}
            return 200, {"message": "Annotation added", "id": ident}
        ident = int(rest.removeprefix("/"))
        if method != "PATCH" or ident not in self.annotations:
            return 404, {"message": "Annotation not found"}
        self.annotations[ident] |= document
        return 200, {"message": "Annotation patched"}


def _problem(document: dict[str, Any], *, partial: bool) -> str:
    for key, value in document.items():
        if key not in _KEYS or type(value) is not _KEYS[key]:
            return f"bad request data: {key}"
    if not (partial or {"time", "tags"} <= document.keys()) or not document.get("text"):
        return "text field should not be empty"
    times = [document[key] for key in ("time", "timeEnd") if key in document]
    # Milliseconds of this century.
    if times != sorted(times) or not all(1e12 < time < 5e12 for time in times):
        return "invalid time range"
    tags = document.get("tags", [])
    if not all(isinstance(tag, str) and tag.strip() == tag != "" for tag in tags):
        return "bad request data: tags"
    if any(len(part) > MAX_TAG_PART for tag in tags for part in tag.split(":", 1)):
        return "value too long for type character varying(100)"
    if 1 + sum(len(tag.encode()) + 3 for tag in tags) > MAX_TAGS_LENGTH:
        return "tags length exceeds the maximum allowed"
    return ""


@contextmanager
def grafana_stand_in(
    prefix: str = "", tls: ssl.SSLContext | None = None
) -> Iterator[GrafanaStandIn]:
    stand_in = GrafanaStandIn(prefix)
    with http_server(stand_in.answer, tls) as url:
        stand_in.url = url + prefix
        yield stand_in
