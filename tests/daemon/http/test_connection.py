"""The limits on connections, their time limits, and the rate of requests."""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest

from tests.cases import cases
from tests.daemon.http.alert_node import WEBHOOK, notification
from tests.daemon.http.conftest import TIMEOUT_S, http_client
from tests.manual_clock import ManualClock
from warpwatch_daemon.for_fleet.api import agent_routes
from warpwatch_serving import connection
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.connection import Connections, Peer, PeerRates
from warpwatch_serving.routes import create_app

HEAD = b" /%s HTTP/1.1\r\nHost: localhost\r\n"
CHUNK_BYTES = 100_000
ONE = Peer("10.0.0.1")
ROOT = Peer("uid 0", 0, privileged=True, on_socket=True)
CASES = cases(__file__)


class ManualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: ManualClock) -> None:
        self._manual_clock = clock
        super().__init__()

    def time(self) -> float:
        return self._manual_clock.monotonic()


class Site:
    """Connections to an application; its path is the number of bytes that it answers with.

    It never answers ``/never``, fails at ``/fault``, and reads the body of a POST. A story moves
    clients by their names; the journal has what the application is asked and what clients read.
    """

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.loop = ManualLoop(self.clock)
        self.connections = Connections(self)
        self.asked = 0
        self.clients: dict[str, socket.socket] = {}
        self.lines: list[str] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        about = {key: scope[key] for key in scope if key not in ("type", "asgi", "state")}
        if scope["path"] != "/never":
            self.say(f"{scope['state']['peer'].name} asks {about}")
        if scope["path"] == "/never":
            await self.loop.create_future()
        while scope["method"] == "POST" and (part := await receive()):
            self.say(f"part {part}")
            if not part.get("more_body"):
                break
        size = int(scope["path"].split()[0][1:])
        headers = [(b"content-length", b"%d" % size)]
        try:
            await self.answer(size, headers, send)
        except OSError as error:
            self.say(f"{scope['path']} is not answered: {type(error).__name__}")
            raise

    async def answer(self, size: int, headers: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for sent in range(0, size, CHUNK_BYTES):
            body = b"x" * min(CHUNK_BYTES, size - sent)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body"})

    def say(self, text: str) -> None:
        self.lines.append(f"    {text}")

    def connect(self, *names: str, peer: Peer = ONE) -> None:
        for name in names:
            ours, theirs = socket.socketpair()
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            for end in (ours, theirs):
                end.setblocking(False)
            self.clients[name] = ours

            async def serve(theirs: socket.socket = theirs) -> None:
                self.connections.serve(theirs, peer)

            self.loop.run_until_complete(serve())
            self.settle()

    def crowd(self, count: int, path: bytes) -> None:
        """Connect clients of as many addresses, each of which asks for the path."""
        for number in range(count):
            self.connect(f"c{number}", peer=Peer(f"10.0.1.{number}"))
            self.ask(f"c{number}", path)
        self.forget()

    def forget(self) -> None:
        """Leave the requests so far out of the journal."""
        self.lines[:] = [line for line in self.lines if " asks " not in line]

    def send(self, name: str, content: bytes) -> None:
        self.clients[name].send(content)
        self.settle()

    def ask(self, name: str, path: bytes = b"2", rest: bytes = b"", verb: bytes = b"GET") -> None:
        self.send(name, verb + HEAD % path + rest + b"\r\n")

    def settle(self) -> None:
        """Let the loop do all that it can do at this time."""
        for _ in range(30):
            self.loop.run_until_complete(asyncio.sleep(0))

    def wait(self, seconds: float) -> None:
        self.settle()
        self.clock.advance(seconds)
        self.settle()

    def read(self, name: str, limit: int = 2**20) -> bytes:
        received, end = b"", b""
        try:
            while part := self.clients[name].recv(min(65536, limit - len(received))):
                received += part
                self.settle()
            end = b"<closed>" if len(received) < limit else b""
        except BlockingIOError:
            pass
        except ConnectionResetError:
            end = b"<reset>"
        received = re.sub(rb"date: \w{3}, [\d\w: ]+ GMT", b"date: today", received)
        return re.sub(rb"x{9,}", lambda body: b"<%d bytes>" % len(body[0]), received) + end

    def leave(self, name: str) -> None:
        self.clients[name].close()
        self.settle()

    def close(self, timeout_s: float) -> asyncio.Task[None]:
        closing = self.loop.create_task(self.connections.close(timeout_s))
        self.settle()
        return closing

    @property
    def open(self) -> int:
        return len(self.connections.tasks)

    def told(self, moves: str) -> str:
        """Make the moves; return each with all that came of it."""
        for move in moves.splitlines():
            self.lines.append(move)
            known = {name: getattr(self, name) for name in dir(self) if name[0] != "_"}
            found = eval(move, globals() | known | {"site": self})
            if isinstance(found, bytes | int):
                self.say(f"-> {found!r}")
        return "".join(f"{line}\n" for line in self.lines)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 10.0)
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 10.0)
    monkeypatch.setattr(connection, "RATE_PER_S", 50.0)
    site = Site()
    yield site
    for client in site.clients.values():
        client.close()
    site.loop.run_until_complete(site.connections.close(0.0))
    site.settle()
    assert site.open == 0
    site.loop.close()


@pytest.mark.parametrize("name", CASES)
def test_a_story_of_connections_is_golden(site: Site, golden_case: Any, name: str) -> None:
    golden_case(site.told(CASES[name]))


def test_a_client_that_comes_as_the_server_stops_is_closed(site: Site) -> None:
    ours, theirs = socket.socketpair()

    async def accept_and_stop() -> None:
        site.connections.serve(theirs, ONE)
        await site.connections.close(1.0)

    site.loop.run_until_complete(accept_and_stop())
    ours.close()
    assert theirs.fileno() == -1


def test_connections_of_a_server_know_of_each_other(serve):
    server = serve()
    with ExitStack() as stack, http_client(server.url) as client:
        held = [socket.create_connection(server.address, TIMEOUT_S) for _ in range(16)]
        for peer in held:
            stack.enter_context(peer)
        assert client.get("healthz").status_code == 200
        assert held[0].recv(100) == b""


def test_a_peer_has_a_burst_and_then_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "RATE_PER_S", 50.0)
    rates = PeerRates(2)
    assert [rates.admits("10.0.0.1", 0.0) for _ in range(201)] == 200 * [True] + [False]
    assert [rates.admits("10.0.0.1", 0.02) for _ in range(2)] == [True, False]
    assert rates.admits("10.0.0.2", 0.02)
    # The peer that was silent for longest is forgotten, and has its burst again.
    assert rates.admits("10.0.0.3", 0.02)
    assert rates.admits("10.0.0.1", 0.02)


def test_a_body_over_one_mebibyte_is_refused(client, agent):
    body = b'{"job": "' + b"x" * 2**20 + b'"}'
    headers = {"Content-Type": "application/json"}
    answer = client.post("/api/v1/captures", content=body, headers=headers)
    assert (answer.status_code, answer.json()["error"]["reason"]) == (413, "too_large")
    assert agent.asked == []


def test_sixteen_webhooks_are_answered_at_once(agent, tmp_path):
    token, gate = tmp_path / "token", threading.Event()
    token.write_text("secret")
    headers = {"Authorization": "Bearer secret"}
    agent.receive_alerts = lambda alerts, own_name: gate.wait() and []

    async def collect() -> list[int]:
        app = create_app(agent, HttpConfig(token_file=token), routes=agent_routes)
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            one = partial(client.post, WEBHOOK, json=notification(), headers=headers)
            tasks = [asyncio.create_task(one()) for _ in range(18)]
            # All have come, and two were refused.
            for _ in range(1000):
                await asyncio.sleep(0)
            gate.set()
            return [(await task).status_code for task in tasks]

    assert asyncio.run(collect()) == 16 * [200] + 2 * [503]
