"""What one peer may ask of the daemon, and the deadlines and places of its connections."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import httpx
import pytest
from uvicorn.server import ServerState

from tests.daemon.http.alert_node import WEBHOOK, notification
from tests.daemon.http.conftest import TIMEOUT_S, http_client
from tests.manual_clock import ManualClock
from warpwatch_daemon.for_fleet.routes import agent_routes
from warpwatch_serving import connection, guard
from warpwatch_serving.app import create_app
from warpwatch_serving.config import HttpConfig
from warpwatch_serving.connection import Connection, OpenConnections
from warpwatch_serving.guard import PeerLimit
from warpwatch_serving.peer import Peer, network
from warpwatch_serving.server import _uvicorn_config

HEAD = b"GET /%s HTTP/1.1\r\nHost: localhost\r\n"
CHUNK_BYTES = 100_000


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
        self.others = OpenConnections()
        self.state = ServerState()
        self.config = _uvicorn_config(self, Connection, None)
        self.config.load()
        self.asked = 0
        self.peers: list[socket.socket] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked += 1
        if scope["path"] == "/never":
            await self.loop.create_future()
        size = int(scope["path"][1:])
        headers = [(b"content-length", b"%d" % size)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for sent in range(0, size, CHUNK_BYTES):
            body = b"x" * min(CHUNK_BYTES, size - sent)
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body"})

    def connect(self) -> socket.socket:
        """Return the peer's end."""
        ours, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        ours.setblocking(False)
        self.peers.append(ours)

        def protocol() -> Connection:
            about = {"config": self.config, "server_state": self.state, "app_state": {}}
            return Connection(**about, others=self.others, _loop=self.loop)

        self.loop.run_until_complete(self.loop.connect_accepted_socket(protocol, theirs))
        return ours

    def ask(self, peer: socket.socket, path: bytes = b"2") -> None:
        peer.send(HEAD % path + b"\r\n")
        self.settle()

    def settle(self) -> None:
        """Let the loop do all that it can do at this time."""
        for _ in range(20):
            self.loop.run_until_complete(asyncio.sleep(0))

    def wait(self, seconds: float) -> None:
        self.settle()
        self.clock.advance(seconds)
        self.settle()

    def read(self, peer: socket.socket, limit: int = 2**20) -> bytes:
        """Return what the peer can read now, with ``<closed>`` after it where that is the end."""
        received = b""
        try:
            while part := peer.recv(min(65536, limit - len(received))):
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
        """How many connections uvicorn counts."""
        return len(self.state.connections)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 10.0)
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 10.0)
    site = Site()
    yield site
    for peer in site.peers:
        peer.close()
    for task in site.state.tasks:
        task.cancel()
    site.settle()
    assert (site.open, site.others._of_peer) == (0, {})
    site.loop.close()


def test_a_peer_that_sends_no_whole_head_is_cut_off_after_ten_seconds(site: Site) -> None:
    silent, slow = site.connect(), site.connect()
    slow.send(HEAD % b"2")
    for _ in range(9):
        site.wait(1.1)
        slow.send(b"X-Slow: 1\r\n")
    assert site.open == 2
    site.wait(0.2)
    assert (site.read(silent), site.read(slow)) == (b"<closed>", b"<closed>")


def test_a_peer_keeps_its_connection_for_75_s_after_each_answer(site: Site) -> None:
    # An answer that takes long is waited for.
    site.ask(site.connect(), b"never")
    peer = site.connect()
    for _ in range(3):
        site.ask(peer)
        assert site.read(peer).endswith(b"\r\n\r\nxx")
        site.wait(74)
    assert site.open == 2
    site.wait(1.1)
    assert (site.open, site.read(peer)) == (1, b"<closed>")


@pytest.mark.parametrize("size", [b"50000", b"1000000"])
def test_a_peer_that_reads_nothing_is_cut_off_after_ten_seconds(site: Site, size: bytes) -> None:
    """The smaller answer is written as a whole, the larger one waits until there is space."""
    peer = site.connect()
    site.ask(peer, size)
    site.wait(9.9)
    assert site.open == 1
    site.wait(0.2)
    assert site.open == 0
    assert len(site.read(peer)) < int(size)


def test_a_peer_that_reads_slowly_gets_its_whole_answer(site: Site) -> None:
    peer = site.connect()
    site.ask(peer, b"500000")
    received = 0
    while received < 500_000:
        site.wait(9)
        received += len(site.read(peer, CHUNK_BYTES))
        assert site.open == 1


def test_a_peer_that_does_not_read_makes_no_more_answers_than_fit(site: Site) -> None:
    peer = site.connect()
    peer.send((HEAD % b"200000" + b"\r\n") * 100)
    site.settle()
    assert site.asked == 1


def test_a_ninth_connection_takes_the_place_of_the_longest_idle_one(site: Site) -> None:
    peers = [site.connect() for _ in range(8)]
    for number, path in enumerate((b"never", b"50000", b"2", b"2", *4 * [b"never"])):
        site.ask(peers[number], path)
    assert site.read(peers[2]).endswith(b"xx")
    site.connect()
    # The first waits for its answer, and the second has not read its own.
    assert site.read(peers[2]) == b"<closed>"
    assert (site.open, site.read(peers[0])) == (8, b"")


def test_a_refused_connection_says_why_and_takes_no_place(site: Site) -> None:
    for _ in range(8):
        site.ask(site.connect(), b"never")
    asking, silent = site.connect(), site.connect()
    assert site.open == 8
    site.ask(asking)
    answer = site.read(asking)
    assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nRetry-After: 1\r\n" in answer
    assert answer.endswith(b'"a peer may have 8 connections, and all together 112"}}\n<closed>')
    site.wait(0.9)
    assert site.read(silent) == b""
    site.wait(0.2)
    assert site.read(silent) == b"<closed>"
    assert site.asked == 8


def test_connections_of_a_server_know_of_each_other(serve):
    server = serve()
    with ExitStack() as stack, http_client(server.url) as client:
        held = [socket.create_connection(server.address, TIMEOUT_S) for _ in range(8)]
        for peer in held:
            stack.enter_context(peer)
        assert client.get("healthz").status_code == 200
        assert held[0].recv(100) == b""


class Busy:
    """A connection that waits for its answer."""

    def is_idle(self) -> bool:
        return False


def test_however_many_peers_there_are_the_last_places_are_roots() -> None:
    others: Any = OpenConnections()
    peers = [Peer(f"10.0.0.{number}") for number in range(15)]
    taken = sum(others.admit(peer, Busy()) for peer in peers for _ in range(9))
    assert taken == 14 * 8
    assert not others.admit(Peer("10.0.1.1"), Busy())
    assert others.admit(Peer("uid 0", 0, privileged=True, on_socket=True), Busy())


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def limit(clock: ManualClock) -> PeerLimit:
    return PeerLimit(clock.monotonic)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests at once, and one in four seconds."""
    monkeypatch.setattr(guard, "RATE_PER_S", 0.25)
    monkeypatch.setattr(guard, "BURST", 2.0)


def ask_app(
    agent: Any, clock: ManualClock, *paths: str, wait_s: float = 0.0
) -> list[httpx.Response]:
    """Return the answers to GET, one after the other, with a pause after each."""

    async def collect() -> list[httpx.Response]:
        app = create_app(
            agent, HttpConfig(), loopback=True, routes=agent_routes, monotonic=clock.monotonic
        )
        transport = httpx.ASGITransport(app=app)
        answers = []
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path in paths:
                answers.append(await client.get(path))
                clock.advance(wait_s)
        return answers

    return asyncio.run(collect())


def test_a_peer_has_a_burst_and_then_its_rate(slow, clock, limit):
    assert [limit.wait_s("10.0.0.1") for _ in range(3)] == [0.0, 0.0, 4.0]
    assert limit.wait_s("10.0.0.2") == 0.0
    clock.advance(4)
    assert [limit.wait_s("10.0.0.1"), limit.wait_s("10.0.0.1")] == [0.0, 4.0]
    clock.advance(1000)
    assert [limit.wait_s("10.0.0.1") for _ in range(3)] == [0.0, 0.0, 4.0]


def test_what_requests_cost_is_limited_too(clock, limit):
    assert limit.wait_s("uid 1000") == 0.0
    limit.charge("uid 1000", 2.5)
    assert limit.wait_s("uid 1000") == pytest.approx(5.0)
    assert limit.wait_s("uid 1001") == 0.0
    clock.advance(5.1)
    assert limit.wait_s("uid 1000") == 0.0


def test_the_table_of_peers_forgets_the_longest_silent(slow, limit, monkeypatch):
    monkeypatch.setattr(guard, "MAX_PEERS", 2)
    hosts = ("10.0.0.1", "10.0.0.2", "10.0.0.3")
    assert [limit.wait_s(host) for host in 2 * hosts] == 6 * [0.0]
    assert [limit.wait_s(host) for host in ("10.0.0.3", "10.0.0.3")] == [0.0, 4.0]


def test_addresses_of_one_ipv6_network_count_as_one():
    assert network("2001:db8:1:2::1") == network("2001:db8:1:2:ffff::9")
    assert network("2001:db8:1:2::1") != network("2001:db8:1:3::1")
    assert network("::ffff:10.0.0.1") != network("::ffff:10.0.0.2")


def test_too_many_requests_are_refused_until_a_named_time(slow, agent, clock):
    *admitted, refused, webhook = ask_app(agent, clock, *3 * ["/healthz"], WEBHOOK)
    assert [answer.status_code for answer in admitted] == [200, 200]
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "4")
    assert refused.json()["error"]["reason"] == "too_many_requests"
    # Alertmanager asks again after a 503, and not after a 429.
    assert (webhook.status_code, webhook.headers["retry-after"]) == (503, "4")
    assert agent.codes == {200: 2, 429: 1, 503: 1}


def test_the_time_of_the_server_s_thread_is_what_a_request_costs(agent, clock, monkeypatch):
    # Each request takes 1.5 s of the 2 s that a peer may use at once.
    monkeypatch.setattr("time.thread_time", itertools.count(0.0, 1.5).__next__)
    answers = ask_app(agent, clock, *3 * ["/healthz"])
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[-1].headers["retry-after"] == "10"


def test_what_monitoring_sends_is_never_limited(agent, clock):
    # Two a second, over five minutes.
    paths = 200 * ["/healthz", "/readyz", "/metrics"]
    assert Counter(one.status_code for one in ask_app(agent, clock, *paths, wait_s=0.5)) == {
        200: 600
    }


def test_a_fault_that_each_request_meets_is_logged_once_a_minute(agent, clock, caplog):
    agent.exported = lambda: 1 / 0
    with caplog.at_level(logging.ERROR):
        answers = ask_app(agent, clock, *5 * ["/metrics"], wait_s=20)
    assert {answer.status_code for answer in answers} == {500}
    assert caplog.messages == 2 * ["a request for '/metrics' failed"]


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_one_mebibyte_is_refused(client, agent, declared):
    body = b'{"job": "' + b"x" * 2**20 + b'"}'
    content = body if declared else iter([body[i : i + 65536] for i in range(0, len(body), 65536)])
    answer = client.post(
        "/api/v1/captures", content=content, headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["reason"]) == (413, "too_large")
    assert agent.asked == []


def test_sixteen_webhooks_are_answered_at_once(agent, tmp_path):
    token, gate = tmp_path / "token", threading.Event()
    token.write_text("secret")
    headers = {"Authorization": "Bearer secret"}
    agent.receive_alerts = lambda alerts, own_name: gate.wait() and []

    async def collect() -> list[int]:
        app = create_app(agent, HttpConfig(token_file=token), loopback=True, routes=agent_routes)
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
