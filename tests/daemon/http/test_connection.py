"""The limits on connections, their time limits, and the rate of requests."""

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest

from tests.daemon.http.alert_node import WEBHOOK, notification
from tests.daemon.http.conftest import TIMEOUT_S, http_client
from tests.manual_clock import ManualClock
from warpwatch_daemon.for_fleet.api import agent_routes
from warpwatch_serving import connection
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.connection import Connections, Peer, PeerRates
from warpwatch_serving.routes import create_app

HEAD = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n"
CHUNK_BYTES = 100_000
ONE = Peer("10.0.0.1")


class ManualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: ManualClock) -> None:
        self._manual_clock = clock
        super().__init__()

    def time(self) -> float:
        return self._manual_clock.monotonic()


class Site:
    """Connections to an application; its path is the number of bytes that it answers with."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.loop = ManualLoop(self.clock)
        self.connections = Connections(self)
        self.asked = 0
        self.clients: list[socket.socket] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        if scope["path"] == "/never":
            await self.loop.create_future()
        if scope["method"] == "POST":
            await receive()
        size = int(scope["path"][1:])
        headers = [(b"content-length", b"%d" % size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for sent in range(0, size, CHUNK_BYTES):
            body = b"x" * min(CHUNK_BYTES, size - sent)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body"})

    def connect(self, peer: Peer = ONE) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        for end in (ours, theirs):
            end.setblocking(False)
        self.clients.append(ours)

        async def serve() -> None:
            self.connections.serve(theirs, peer)

        self.loop.run_until_complete(serve())
        self.settle()
        return ours

    def ask(self, client: socket.socket, path: bytes = b"2", rest: bytes = b"") -> None:
        client.send(HEAD % path + rest + b"\r\n")
        self.settle()

    def settle(self) -> None:
        """Let the loop do all that it can do at this time."""
        for _ in range(30):
            self.loop.run_until_complete(asyncio.sleep(0))

    def wait(self, seconds: float) -> None:
        self.settle()
        self.clock.advance(seconds)
        self.settle()

    def read(self, client: socket.socket, limit: int = 2**20) -> bytes:
        received = b""
        try:
            while part := client.recv(min(65536, limit - len(received))):
                received += part
                self.settle()
                if len(received) == limit:
                    return received
        except BlockingIOError:
            return received
        except ConnectionResetError:
            pass
        return received + b"<closed>"

    @property
    def open(self) -> int:
        return len(self.connections.tasks)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 10.0)
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 10.0)
    monkeypatch.setattr(connection, "RATE_PER_S", 50.0)
    site = Site()
    yield site
    for client in site.clients:
        client.close()
    site.loop.run_until_complete(site.connections.close(0.0))
    site.settle()
    assert site.open == 0
    site.loop.close()


def test_a_client_that_waits_before_it_sends_the_body_is_told_to_go_on(site):
    client = site.connect()
    client.send(b"POST" + HEAD[3:] % b"2" + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
    site.settle()
    assert site.read(client).startswith(b"HTTP/1.1 100 ")
    client.send(b"ok")
    site.settle()
    assert site.read(client).startswith(b"HTTP/1.1 200 ")


def test_a_client_that_sends_no_whole_head_is_cut_off_after_ten_seconds(site: Site) -> None:
    silent, slow = site.connect(), site.connect()
    slow.send(HEAD % b"2")
    for _ in range(9):
        site.wait(1.1)
        slow.send(b"X-Slow: 1\r\n")
    assert site.open == 2
    site.wait(0.2)
    assert (site.read(silent), site.read(slow)) == (b"<closed>", b"<closed>")


def test_a_head_beyond_32_kib_is_refused(site: Site) -> None:
    client = site.connect()
    for _ in range(5):
        client.send(HEAD % b"2" + b"X-Long: " + b"x" * 8000)
        site.settle()
    assert site.read(client).startswith(b"HTTP/1.1 431 ")
    assert site.asked == 0


def test_a_client_keeps_its_connection_for_75_s_after_each_answer(site: Site) -> None:
    # An answer that takes long is waited for.
    site.ask(site.connect(), b"never")
    client = site.connect()
    for _ in range(3):
        site.ask(client)
        assert site.read(client).endswith(b"\r\n\r\nxx")
        site.wait(74)
    assert site.open == 2
    site.wait(1.1)
    assert (site.open, site.read(client)) == (1, b"<closed>")


@pytest.mark.parametrize("size", [b"50000", b"1000000"])
def test_a_client_that_reads_nothing_is_cut_off_after_ten_seconds(site: Site, size: bytes) -> None:
    client = site.connect()
    site.ask(client, size)
    site.wait(9.9)
    assert site.open == 1
    site.wait(0.2)
    assert site.open == 0
    assert len(site.read(client)) < int(size)


def test_a_client_that_reads_slowly_gets_its_whole_answer(site: Site) -> None:
    client = site.connect()
    site.ask(client, b"500000")
    received = 0
    while received < 500_000:
        site.wait(9)
        received += len(site.read(client, CHUNK_BYTES))
        assert site.open == 1


def test_a_client_that_does_not_read_makes_no_more_answers_than_fit(site: Site) -> None:
    client = site.connect()
    client.send((HEAD % b"200000" + b"\r\n") * 100)
    site.settle()
    assert site.asked == 1


def test_an_answer_ends_the_connection_of_a_client_that_still_sends_its_request(site: Site) -> None:
    """An endless body of one-byte chunks keeps the process busy for a second at most."""
    client = site.connect()
    site.ask(client, rest=b"Transfer-Encoding: chunked\r\n")
    answer = site.read(client)
    assert b"\r\nconnection: close\r\n" in answer.lower() and answer.endswith(b"xx<closed>")
    for _ in range(9):
        client.send(b"1\r\nx\r\n")
        site.wait(0.1)
    assert (site.open, site.asked) == (1, 1)
    site.wait(0.2)
    assert site.open == 0
    with pytest.raises(OSError):
        for _ in range(3):
            client.send(b"1\r\nx\r\n")


def test_a_client_beyond_16_takes_the_place_of_the_one_that_is_waited_for_longest(
    site: Site,
) -> None:
    clients = []
    for path in (b"never", b"50000", b"2", b"2", *12 * [b"never"]):
        clients.append(site.connect())
        site.ask(clients[-1], path)
        site.wait(0.1)
    assert site.read(clients[2]).endswith(b"xx")
    other = site.connect(Peer("10.0.0.2"))
    site.connect()
    # The first waits for its answer; the second does not read its own.
    assert site.read(clients[1]).endswith(b"<closed>")
    assert (site.read(clients[0]), site.read(clients[2]), site.read(other)) == (b"", b"", b"")
    assert site.open == 17


def test_a_client_that_comes_as_the_server_stops_is_closed(site: Site) -> None:
    ours, theirs = socket.socketpair()

    async def accept_and_stop() -> None:
        site.connections.serve(theirs, ONE)
        await site.connections.close(1.0)

    site.loop.run_until_complete(accept_and_stop())
    ours.close()
    assert theirs.fileno() == -1


def test_the_answer_to_head_has_no_body_and_the_connection_stays(site: Site) -> None:
    client = site.connect()
    client.send(b"HEAD" + HEAD[3:] % b"2" + b"\r\n")
    site.settle()
    assert site.read(client).endswith(b"\r\n\r\n")
    site.ask(client)
    assert site.read(client).endswith(b"\r\n\r\nxx")


def test_a_client_beyond_16_that_are_all_answered_is_closed(site: Site) -> None:
    for _ in range(16):
        site.ask(site.connect(), b"never")
    assert site.read(site.connect()) == b"<closed>"
    assert site.open == 16


def test_however_many_peers_there_are_the_last_places_are_roots(site: Site) -> None:
    for number in range(112):
        site.ask(site.connect(Peer(f"10.0.0.{number}")), b"never")
    assert site.read(site.connect(Peer("10.0.1.1"))) == b"<closed>"
    root = site.connect(Peer("uid 0", 0, privileged=True, on_socket=True))
    site.ask(root)
    assert site.read(root).endswith(b"xx")


def test_127_clients_that_never_read_keep_no_other_from_its_answer(site: Site) -> None:
    for number in range(127):
        site.ask(site.connect(Peer(f"10.0.0.{number}")), b"1000000")
    probe = site.connect(Peer("10.0.1.1"))
    site.ask(probe)
    assert site.read(probe).endswith(b"xx")


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


def test_a_request_beyond_the_rate_waits_and_is_answered(site: Site) -> None:
    flooding, other = site.connect(), site.connect(Peer("10.0.0.2"))
    for _ in range(4):
        flooding.send((HEAD % b"2" + b"\r\n") * 51)
        for _ in range(10):
            site.settle()
            site.read(flooding)
    assert site.asked == 200
    site.ask(other)
    assert site.read(other).endswith(b"xx")
    site.wait(0.6)
    assert site.asked == 205


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
