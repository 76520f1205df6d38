"""What one peer may ask of the daemon."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from typing import Any

import httpx
import pytest

from tests.daemon.http.conftest import local_client
from warpwatch_daemon.config.sections import HttpConfig
from warpwatch_daemon.http import connection as connection_module
from warpwatch_daemon.http import guard
from warpwatch_daemon.http.app import create_app
from warpwatch_daemon.http.guard import PeerLimit
from warpwatch_daemon.http.peer import Peer, network


def set_limits(monkeypatch: pytest.MonkeyPatch, **limits: float) -> None:
    for name, value in limits.items():
        monkeypatch.setattr(guard, name, value)


def test_a_peer_has_a_burst_and_then_its_rate(monkeypatch):
    now = [100.0]
    set_limits(monkeypatch, RATE_PER_S=2.0, BURST=3.0)
    limit = PeerLimit(clock=lambda: now[0])
    assert [limit.wait_s("10.0.0.1") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert limit.wait_s("10.0.0.2") == 0.0
    now[0] += 0.5
    assert [limit.wait_s("10.0.0.1"), limit.wait_s("10.0.0.1")] == [0.0, 0.5]


def test_what_requests_cost_is_limited_too():
    now = [100.0]
    limit = PeerLimit(clock=lambda: now[0])
    assert limit.wait_s("uid 1000") == 0.0
    limit.charge("uid 1000", 2.5)
    assert limit.wait_s("uid 1000") == pytest.approx(5.0)
    assert limit.wait_s("uid 1001") == 0.0
    now[0] += 5.1
    assert limit.wait_s("uid 1000") == 0.0


class Busy:
    """A connection that waits for its answer."""

    def is_idle(self) -> bool:
        return False


def test_however_many_peers_there_are_the_last_places_are_roots():
    others: Any = connection_module.OpenConnections()
    peers = [Peer(f"10.0.0.{number}") for number in range(15)]
    taken = sum(others.admit(peer, Busy()) for peer in peers for _ in range(9))
    assert taken == 14 * 8
    assert not others.admit(Peer("10.0.1.1"), Busy())
    assert others.admit(Peer("uid 0", 0, privileged=True, on_socket=True), Busy())


def test_addresses_of_one_ipv6_network_count_as_one():
    assert network("2001:db8:1:2::1") == network("2001:db8:1:2:ffff::9")
    assert network("2001:db8:1:2::1") != network("2001:db8:1:3::1")
    assert network("::ffff:10.0.0.1") != network("::ffff:10.0.0.2")


def test_the_table_of_peers_forgets_the_longest_silent(monkeypatch):
    set_limits(monkeypatch, RATE_PER_S=1.0, BURST=1.0, MAX_PEERS=2)
    limit = PeerLimit(clock=lambda: 0.0)
    assert [limit.wait_s(f"10.0.0.{host}") for host in (1, 2, 3)] == [0.0, 0.0, 0.0]
    assert limit.wait_s("10.0.0.3") == 1.0
    assert limit.wait_s("10.0.0.1") == 0.0


def test_too_many_requests_are_refused_until_a_named_time(agent, monkeypatch):
    set_limits(monkeypatch, RATE_PER_S=0.25, BURST=2.0)
    app = create_app(agent, HttpConfig(), loopback=True)

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.get("/healthz") for _ in range(3)]

    *admitted, refused = asyncio.run(ask())
    assert [answer.status_code for answer in admitted] == [200, 200]
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "4"
    assert refused.json()["error"]["reason"] == "too_many_requests"
    assert agent.codes == {200: 2, 429: 1}


def test_what_monitoring_sends_is_never_limited(client):
    assert {client.get("/healthz").status_code for _ in range(150)} == {200}


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_over_one_mebibyte_is_refused(client, agent, declared):
    body = b'{"job": "' + b"x" * 2**20 + b'"}'
    content = body if declared else iter([body[i : i + 65536] for i in range(0, len(body), 65536)])
    answer = client.post(
        "/api/v1/captures", content=content, headers={"Content-Type": "application/json"}
    )
    assert (answer.status_code, answer.json()["error"]["reason"]) == (413, "too_large")
    assert agent.asked == []


def test_a_peer_that_sends_no_request_is_cut_off(serve, monkeypatch):
    monkeypatch.setattr(connection_module, "HEAD_TIMEOUT_S", 0.3)
    with socket.create_connection(serve().address, timeout=30) as connection:
        begun = time.monotonic()
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n")
        while time.monotonic() - begun < 0.2:
            connection.sendall(b"X-Slow: 1\r\n")
            time.sleep(0.05)
        assert connection.recv(100) == b""
        assert time.monotonic() - begun < 3


def test_a_peer_that_does_not_read_is_cut_off(serve, monkeypatch):
    """What it asked for is more than the buffers of both ends."""
    monkeypatch.setattr(connection_module, "WRITE_TIMEOUT_S", 0.3)
    server = serve()
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(server.address)
        connection.settimeout(5)
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 400)
        time.sleep(2)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while part := connection.recv(65536):
                received += part
    assert 0 < received.count(b"HTTP/1.1 ") < 400


def test_refused_connections_take_no_place_of_another_peers(serve, monkeypatch):
    """All come over TCP from one peer that reads no answer; another one asks on the socket."""

    def identify(transport: Any) -> Peer:
        return Peer(str(transport.get_extra_info("socket").family))

    monkeypatch.setattr(connection_module, "identify", identify)
    monkeypatch.setattr(connection_module.Connection, "is_idle", lambda self: False)
    server = serve()
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(socket.create_connection(server.address, timeout=30))
        # All are accepted; who is refused and asks nothing is closed after a second.
        time.sleep(0.3)
        client = stack.enter_context(local_client(server))
        assert client.get("/healthz").status_code == 200


def test_a_ninth_connection_of_a_peer_takes_the_place_of_an_idle_one(serve):
    server = serve()
    held = [socket.create_connection(server.address, timeout=30) for _ in range(8)]
    try:
        assert httpx.get(server.url + "healthz").status_code == 200
        assert held[0].recv(100) == b""
        for connection in held[1:]:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
    finally:
        for connection in held:
            connection.close()
