"""What one peer may ask of the daemon."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections import Counter
from functools import partial
from typing import Any

import httpx
import pytest

from tests.daemon.http.alert_node import WEBHOOK, notification
from tests.manual_clock import ManualClock
from warpwatch_daemon.config.sections import HttpConfig
from warpwatch_daemon.http import guard
from warpwatch_daemon.http.app import create_app
from warpwatch_daemon.http.guard import PeerLimit
from warpwatch_daemon.http.peer import network


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


def ask(agent: Any, clock: ManualClock, *paths: str, wait_s: float = 0.0) -> list[httpx.Response]:
    """Return the answers to GET, one after the other, with a pause after each."""

    async def collect() -> list[httpx.Response]:
        app = create_app(agent, HttpConfig(), loopback=True, monotonic=clock.monotonic)
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
    *admitted, refused, webhook = ask(agent, clock, *3 * ["/healthz"], WEBHOOK)
    assert [answer.status_code for answer in admitted] == [200, 200]
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "4")
    assert refused.json()["error"]["reason"] == "too_many_requests"
    # Alertmanager asks again after a 503, and not after a 429.
    assert (webhook.status_code, webhook.headers["retry-after"]) == (503, "4")
    assert agent.codes == {200: 2, 429: 1, 503: 1}


def test_the_time_of_the_server_s_thread_is_what_a_request_costs(agent, clock, monkeypatch):
    # Each request takes 1.5 s of the 2 s that a peer may use at once.
    monkeypatch.setattr("time.thread_time", itertools.count(0.0, 1.5).__next__)
    answers = ask(agent, clock, *3 * ["/healthz"])
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert answers[-1].headers["retry-after"] == "10"


def test_what_monitoring_sends_is_never_limited(agent, clock):
    # Two a second, over five minutes.
    paths = 200 * ["/healthz", "/readyz", "/metrics"]
    assert Counter(one.status_code for one in ask(agent, clock, *paths, wait_s=0.5)) == {200: 600}


def test_a_fault_that_each_request_meets_is_logged_once_a_minute(agent, clock, caplog):
    agent.exported = lambda: 1 / 0
    with caplog.at_level(logging.ERROR):
        answers = ask(agent, clock, *5 * ["/metrics"], wait_s=20)
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
        app = create_app(agent, HttpConfig(token_file=token), loopback=True)
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
