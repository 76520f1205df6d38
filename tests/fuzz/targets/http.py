"""Requests to every route, as h11 lets them through: method, path, query, headers and body."""

import asyncio
import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h11
from starlette.types import ASGIApp, Message

from tests.daemon.http.alert_node import alert, notification
from tests.daemon.http.conftest import CAPTURE, MemoryAgent
from tests.fuzz.targets.web_config import HASH
from tests.fuzz.watch import Target
from warpwatch_daemon.for_fleet.api import agent_routes
from warpwatch_serving import access
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.connection import HttpStream, Peer, Slot
from warpwatch_serving.routes import create_app
from warpwatch_serving.web_config import BasicAuth

HEAD = "Host: 127.0.0.1:9400\r\nAuthorization: Bearer secret\r\nContent-Type: application/json\r\n"
QUERIES = ("", "?job=llama-7b&kind=straggler", "?active=true", "?kind=torch&job=%ff%00")
BODIES = ({"job": "llama-7b", "kind": "stacks"}, notification(alert(training_job="llama-7b")))
TOKENS = (
    b"Authorization: Basic dXNlcjpwYXNz\r\n", b"Authorization: Bearer \xe9\r\n", b"Host: [::1\r\n",
    b"Origin: https://ui.perfetto.dev\r\n", b"Range: bytes=0-1,5-\r\n", b"Range: bytes=-9,9-\r\n",
    b"Accept: application/openmetrics-text; version=1.0.0; q=x\r\n", b"If-Range: x\r\n",
    b"Accept-Encoding: gzip\r\n", b"X-Forwarded-For: 1.2.3.4\r\n", b"Via: x\r\n", b"%00", b"%ff",
    b"Content-Length: 2\r\n", b"\xb2", b"/..", b"null", b"1e999", b'"ranks":[', b"\\ud800", b"HEAD",
)  # fmt: skip
PEERS = (
    Peer("loopback"), Peer("uid 1234", 1234, on_socket=True),
    Peer("uid 0", 0, privileged=True, on_socket=True), Peer("unknown user", on_socket=True),
)  # fmt: skip
NO_SOCKET: Any = SimpleNamespace(get_extra_info=lambda name: None)


class Failed(Exception):
    """The daemon answers 500; its log said why."""


class Routes:
    def __init__(self, folder: Path) -> None:
        agent = MemoryAgent(folder)
        for name in ("report.html", "capture.json"):
            (folder / name).write_text("{}" * 50)
        (folder / "token").write_text("secret")
        token = HttpConfig(token_file=folder / "token")
        users = BasicAuth({"user": HASH.decode()})
        self._apps: list[ASGIApp] = [
            create_app(agent, HttpConfig(), routes=agent_routes),
            create_app(agent, token, routes=agent_routes),
            create_app(agent, token, basic_auth=users, routes=agent_routes),
        ]
        self._loop = asyncio.new_event_loop()
        # Only there does an answer of 500 say why.
        self._errors = _Errors()
        access.logger.addHandler(self._errors)
        access.logger.propagate = False
        logging.disable(logging.NOTSET)

    def run(self, data: bytes) -> None:
        """The first byte says to whom and from where, the others are what comes on the wire."""
        first = data[0] if data else 0
        try:
            request, body = read_request(data[1:])
        except h11.RemoteProtocolError:
            return
        app, peer = self._apps[first % 3], PEERS[first // 3 % len(PEERS)]
        scope = HttpStream(Slot(peer), app, NO_SOCKET, NO_SOCKET)._scope(request)
        sent: list[Message] = []
        parts = [body[:3], body[3:]]

        async def receive() -> Message:
            if not parts:
                return {"type": "http.disconnect"}
            part = parts.pop(0)
            return {"type": "http.request", "body": part, "more_body": bool(parts)}

        async def send(message: Message) -> None:
            sent.append(message)

        self._errors.first = None
        self._loop.run_until_complete(app(scope, receive, send))
        if self._errors.first is not None:
            raise Failed(scope["method"], scope["path"]) from self._errors.first
        check_answer(sent, scope["method"])


class _Errors(logging.Handler):
    first: BaseException | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.first = self.first or record.exc_info[1]


def read_request(wire: bytes) -> tuple[h11.Request, bytes]:
    """The first request and what there is of its body. Raises RemoteProtocolError."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(wire)
    request = connection.next_event()
    if not isinstance(request, h11.Request):
        raise h11.RemoteProtocolError("cut short")
    body = b""
    while isinstance(event := connection.next_event(), h11.Data):
        body += event.data
    return request, body


def check_answer(sent: list[Message], method: str) -> None:
    """One whole answer, guarded as a browser needs it."""
    start, *rest = sent
    assert start["type"] == "http.response.start" and start["status"] != 500, sent
    assert all(message["type"] == "http.response.body" for message in rest), sent
    headers = dict(start["headers"])
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert all(b"\n" not in value and b"\r" not in value for value in headers.values())
    body = b"".join(message.get("body", b"") for message in rest)
    is_ours = b"last-modified" not in headers and method != "HEAD"
    if is_ours and headers.get(b"content-type") == b"application/json":
        json.loads(body)


def target(folder: Path) -> Target:
    routes = Routes(folder)
    paths = {"/", "/healthz", "/metrics", f"/api/v1/captures/{CAPTURE.id}/report.html"}
    documents = create_app(MemoryAgent(folder), HttpConfig(), routes=agent_routes).state.document()
    names = (("{id}", CAPTURE.id), ("{file}", "capture.json"))
    for path in documents["paths"]:
        for name, value in names:
            path = path.replace(name, value)
        paths.add(path)
    asked = [f"GET {path}{query} HTTP/1.1\r\n{HEAD}\r\n" for path in paths for query in QUERIES]
    for path, body in zip(("/api/v1/captures", "/api/v1/alertmanager"), BODIES, strict=True):
        text = json.dumps(body)
        asked.append(f"POST {path} HTTP/1.1\r\n{HEAD}Content-Length: {len(text)}\r\n\r\n{text}")
    seeds = [bytes([number]) + text.encode() for number, text in enumerate(asked)]
    return Target(routes.run, seeds, TOKENS, 1536)
