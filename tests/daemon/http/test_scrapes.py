"""Scrapes over a kept connection, and how old a page may be."""

from __future__ import annotations

import gzip
import http.client
import socket
import time
from dataclasses import replace
from typing import Any

import pytest

from warpwatch_daemon.http.metrics import Format, MetricsPages

PLAIN = Format(openmetrics=False, gzip=False)
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Answers:
    """What comes back over one connection, in order."""

    def __init__(self, connection: socket.socket) -> None:
        # One buffer for all answers, which may come together.
        self._received = connection.makefile("rb")

    def next(self) -> tuple[bytes, dict[str, str], bytes]:
        """Status, headers but the date, and body."""
        status = self._received.readline().removeprefix(b"HTTP/1.1 ").strip()
        parsed = http.client.parse_headers(self._received)
        headers = {name.lower(): value for name, value in parsed.items()}
        assert headers.pop("date").endswith(" GMT")
        return status, headers, self._received.read(int(headers["content-length"]))


def connect(server: Any) -> socket.socket:
    return socket.create_connection(server.address, timeout=60)


@pytest.mark.parametrize(
    "more",
    [b"", b"Accept-Encoding: gzip\r\n", b"Accept: application/openmetrics-text\r\n"],
)
def test_a_repeated_scrape_is_answered_as_the_first_was(serve, agent, more):
    request = REQUEST.replace(b"\r\n\r\n", b"\r\n" + more + b"\r\n")
    with connect(serve()) as connection:
        answers = Answers(connection)
        seen = []
        for _ in range(3):
            connection.sendall(request)
            seen.append(answers.next())
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == b"200 OK"
    assert seen[0][1]["x-content-type-options"] == "nosniff"
    assert agent.codes == {200: 3}


def test_a_peer_that_goes_on_asking_is_not_taken_for_silent(serve, monkeypatch):
    monkeypatch.setattr("warpwatch_daemon.http.connection.HEAD_TIMEOUT_S", 1.5)
    with connect(serve()) as connection:
        answers = Answers(connection)
        for _ in range(8):
            connection.sendall(REQUEST)
            assert answers.next()[0] == b"200 OK"
            time.sleep(0.25)


def test_a_fault_is_reported_on_a_kept_connection_too(serve, agent, monkeypatch):
    monkeypatch.setattr("warpwatch_daemon.http.metrics.MAX_AGE_S", -1.0)
    with connect(serve()) as connection:
        answers = Answers(connection)
        connection.sendall(REQUEST)
        assert answers.next()[0] == b"200 OK"
        monkeypatch.setattr(agent, "exported", lambda: 1 / 0)
        connection.sendall(REQUEST)
        assert answers.next()[0] == b"500 Internal Server Error"
    assert agent.codes == {200: 1, 500: 1}


def test_a_peer_that_does_not_read_gets_no_more_pages_than_fit(serve, agent):
    ranks = agent.now.ranks
    many = tuple(replace(ranks[0], name=str(number)) for number in range(900))
    agent.now = replace(agent.now, ranks=many)
    with connect(serve()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        answered = -1
        while answered < agent.codes[200] < 50:
            answered = agent.codes[200]
            connection.sendall(REQUEST)
            deadline = time.monotonic() + (30 if answered < 2 else 2)
            while agent.codes[200] == answered and time.monotonic() < deadline:
                time.sleep(0.01)
    assert 2 <= agent.codes[200] < 50


def test_a_page_is_rendered_once_a_second_however_many_ask(agent):
    now = [100.0]
    pages = MetricsPages(agent, clock=lambda: now[0])
    first = pages.page(PLAIN).content
    agent.now = replace(agent.now, ranks=())
    now[0] += 1.0
    assert pages.page(PLAIN).content == first
    now[0] += 0.2
    assert b"warpwatch_steps_total{" not in pages.page(PLAIN).content
    assert b"warpwatch_steps_total{" in first


def test_each_format_has_its_own_page(agent):
    pages = MetricsPages(agent)
    contents = {
        (openmetrics, compressed): pages.page(Format(openmetrics, compressed)).content
        for openmetrics in (False, True)
        for compressed in (False, True)
    }
    assert contents[True, False].endswith(b"# EOF\n")
    assert b"# EOF" not in contents[False, False]
    for openmetrics in (False, True):
        assert gzip.decompress(contents[openmetrics, True]) == contents[openmetrics, False]


def test_pages_are_rendered_ahead_only_for_who_comes_all_the_time(agent):
    now = [100.0]
    rendered = []
    pages = MetricsPages(agent, clock=lambda: now[0])
    state = agent.now

    def render_at() -> Any:
        rendered.append(now[0])
        return state

    agent.exported = render_at
    pages.page(PLAIN)
    now[0] = 101.0
    pages.refresh()
    assert rendered == [100.0]
    pages.page(PLAIN)
    now[0] = 102.0
    pages.refresh()
    pages.page(PLAIN)
    assert rendered == [100.0, 102.0]
    now[0] = 105.0
    pages.refresh()
    assert rendered == [100.0, 102.0]


def test_a_fault_while_rendering_ahead_is_left_to_the_next_scrape(agent):
    now = [100.0]
    pages = MetricsPages(agent, clock=lambda: now[0])
    for now[0] in (100.0, 101.0):
        pages.page(PLAIN)
    agent.exported = lambda: 1 / 0
    now[0] = 102.5
    pages.refresh()
    with pytest.raises(ZeroDivisionError):
        pages.page(PLAIN)
