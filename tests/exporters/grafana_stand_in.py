"""What Grafana's annotations API does, written from its published schema, and as strict.

https://grafana.com/docs/grafana/latest/developers/http_api/annotations/
"""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "glsa_right"
PATH = "/api/annotations"
# The largest of all tags together that Grafana's default configuration takes, as JSON.
MAX_TAGS_LENGTH = 500
# The columns of Grafana's table of tags.
MAX_TAG_PART = 100
_KEYS = {"dashboardId": int, "dashboardUID": str, "panelId": int, "data": dict}
_KEYS |= {"time": int, "timeEnd": int, "tags": list, "text": str}


class GrafanaStandIn:
    """annotations: by id. requests: method and path of each.

    prefix: where Grafana is served. status: answered to everything, where not None; fail_text: what
    it cannot save, as it answers 500; lose_answers: what is asked for is done, and the connection
    closed without a word.
    """

    def __init__(self, prefix: str = "") -> None:
        self.annotations: dict[int, dict[str, Any]] = {}
        self.requests: list[str] = []
        self.prefix = prefix
        self.token = TOKEN
        self.status: int | None = None
        self.refuse_text = ""
        self.fail_text = ""
        self.lose_answers = False
        self.url = ""

    def only(self) -> dict[str, Any]:
        (annotation,) = self.annotations.values()
        return annotation

    def answer(self, method: str, target: str, headers: Any, body: bytes) -> tuple[int, Any]:
        path, query = urlsplit(target).path, parse_qs(urlsplit(target).query)
        self.requests.append(f"{method} {path}")
        if self.status is not None:
            return self.status, {"message": "as the test wants it"}
        if headers.get("Authorization") != f"Bearer {self.token}":
            return 401, {"message": "Invalid API key"}
        rest = path.removeprefix(self.prefix + PATH)
        if rest == path:
            return 404, {"message": "Not found"}
        if method == "GET" and not rest:
            return 200, self._find(query)
        if headers.get("Content-Type") != "application/json":
            return 400, {"message": "bad request data"}
        try:
            document = json.loads(body)
            problem = _problem(document, partial=method == "PATCH")
        except ValueError:
            problem = "bad request data"
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
            # Without an end it is no region, and both times are the same.
            self.annotations[ident] = {"timeEnd": document["time"], **document}
            return 200, {"message": "Annotation added", "id": ident}
        ident = int(rest.removeprefix("/")) if rest.removeprefix("/").isdecimal() else 0
        if method != "PATCH" or ident not in self.annotations:
            return 404, {"message": "Annotation not found"}
        self.annotations[ident] |= document
        return 200, {"message": "Annotation patched"}


def _problem(document: Any, *, partial: bool) -> str:
    if not isinstance(document, dict) or not document:
        return "bad request data"
    for key, value in document.items():
        if key not in _KEYS or type(value) is not _KEYS[key]:
            return f"bad request data: {key}"
    if not partial and not {"time", "tags", "text"} <= document.keys():
        return "text field should not be empty"
    if not document.get("text", "x"):
        return "text field should not be empty"
    times = [document[key] for key in ("time", "timeEnd") if key in document]
    # Milliseconds of this century.
    if times != sorted(times) or not all(1e12 < time < 5e12 for time in times):
        return "invalid time range"
    return _problem_of_tags(document.get("tags", []))


def _problem_of_tags(tags: list[Any]) -> str:
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

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, document = stand_in.answer(self.command, self.path, self.headers, body)
            if stand_in.lose_answers:
                return
            content = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_PATCH = _do

        def log_message(self, *_: Any) -> None:
            """Not a word on the test's output."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    scheme = "http" if tls is None else "https"
    stand_in.url = f"{scheme}://127.0.0.1:{server.server_port}{prefix}"
    try:
        yield stand_in
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
