"""Scrapes over a kept connection, and how old a page may be."""

from __future__ import annotations

import gzip
import http.client
import socket
import time
from dataclasses import replace
from typing import Any

import bcrypt
import httpx
import pytest

from warpwatch_daemon.http.metrics import Format, MetricsPages
from warpwatch_daemon.http.scrapes import Scrapes

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
    return socket.create_connection(server.address, timeout=10)


@pytest.fixture
def short_way(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each repeated scrape was answered the short way."""
    taken: list[bool] = []
    answer = Scrapes.answer

    def watched(self: Scrapes, *arguments: Any) -> bytes | None:
        found = answer(self, *arguments)
        taken.append(found is not None)
        return found

    monkeypatch.setattr(Scrapes, "answer", watched)
    return taken


@pytest.mark.parametrize(
    "more",
    [b"", b"Accept-Encoding: gzip\r\n", b"Accept: application/openmetrics-text\r\n"],
)
def test_a_repeated_scrape_is_answered_as_the_first_was(serve, backend, short_way, more):
    request = REQUEST.replace(b"\r\n\r\n", b"\r\n" + more + b"\r\n")
    with connect(serve()) as connection:
        answers = Answers(connection)
        seen = []
        for _ in range(3):
            connection.sendall(request)
            seen.append(answers.next())
    assert short_way == [True, True]
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][0] == b"200 OK"
    assert seen[0][1]["x-content-type-options"] == "nosniff"
    assert backend.codes == {200: 3}


def test_requests_of_other_kinds_take_the_usual_way_between_scrapes(serve, backend, short_way):
    requests = [
        REQUEST,
        REQUEST.replace(b"/metrics", b"/healthz"),
        REQUEST,
        REQUEST.replace(b"GET", b"DELETE"),
        REQUEST,
    ]
    statuses = []
    with connect(serve()) as connection:
        answers = Answers(connection)
        for request in requests:
            connection.sendall(request)
            statuses.append(answers.next()[0][:3])
    assert statuses == [b"200", b"200", b"200", b"405", b"200"]
    assert backend.codes == {200: 4, 405: 1}


def test_a_scrape_that_comes_in_pieces_or_with_the_next_is_answered(serve, backend):
    with connect(serve()) as connection:
        answers = Answers(connection)
        connection.sendall(REQUEST)
        first = answers.next()
        connection.sendall(REQUEST[:20])
        connection.sendall(REQUEST[20:])
        assert answers.next() == first
        connection.sendall(REQUEST + REQUEST + REQUEST[:-1])
        assert [answers.next(), answers.next()] == [first, first]
        connection.sendall(REQUEST[-1:])
        assert answers.next() == first
    assert backend.codes == {200: 5}


def test_what_belongs_to_another_request_is_not_taken_for_a_scrape(serve, backend):
    with connect(serve()) as connection:
        answers = Answers(connection)
        connection.sendall(REQUEST)
        answers.next()
        connection.sendall(b"GET /nothing HTTP/1.1\r\nX-Text: ")
        # Else both would come as one.
        time.sleep(0.1)
        connection.sendall(REQUEST)
        assert answers.next()[0] == b"404 Not Found"


def test_two_scrapes_that_come_together_are_two_however_often_they_come(serve, backend):
    with connect(serve()) as connection:
        answers = Answers(connection)
        for _ in range(3):
            connection.sendall(REQUEST + REQUEST)
            assert [answers.next()[0] for _ in range(2)] == [b"200 OK", b"200 OK"]
    assert backend.codes == {200: 6}


def test_who_scrapes_on_is_not_taken_for_silent(serve, monkeypatch):
    monkeypatch.setattr("warpwatch_daemon.http.connection.HEAD_TIMEOUT_S", 1.0)
    with connect(serve()) as connection:
        answers = Answers(connection)
        for _ in range(20):
            connection.sendall(REQUEST)
            assert answers.next()[0] == b"200 OK"
            time.sleep(0.1)


def test_a_connection_that_is_to_be_closed_is_closed(serve, short_way):
    request = REQUEST.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    with connect(serve()) as connection:
        connection.sendall(request)
        assert Answers(connection).next()[1]["connection"] == "close"
        assert connection.recv(1) == b""
    assert short_way == []


def test_a_peer_that_scrapes_too_often_is_told_so_on_the_short_way_too(serve, backend):
    with connect(serve()) as connection:
        answers = Answers(connection)
        # More than a burst, since the rate gives some back meanwhile.
        for _ in range(2000):
            connection.sendall(REQUEST)
            status = answers.next()[0]
            if status != b"200 OK":
                break
    assert status == b"429 Too Many Requests"
    assert backend.codes[200] >= 200
    assert backend.codes[429] == 1


def test_a_repeated_scrape_needs_the_password_that_the_first_had(serve, tmp_path, short_way):
    password = bcrypt.hashpw(b"right", bcrypt.gensalt(4)).decode()
    path = tmp_path / "web-config.yml"
    path.write_text(f"basic_auth_users: {{prometheus: '{password}'}}\n")
    url = serve(web_config=path).url + "metrics"
    with httpx.Client() as client:
        codes = [client.get(url, auth=("prometheus", word)).status_code for word in ("right",) * 3]
        wrong = [client.get(url, auth=("prometheus", "wrong")).status_code for _ in range(3)]
    assert (codes, wrong) == ([200] * 3, [401] * 3)
    assert short_way == [True, True, False, False]


def test_a_fault_is_told_on_a_kept_connection_too(serve, backend, monkeypatch):
    monkeypatch.setattr("warpwatch_daemon.http.metrics.MAX_AGE_S", -1.0)
    with connect(serve()) as connection:
        answers = Answers(connection)
        connection.sendall(REQUEST)
        assert answers.next()[0] == b"200 OK"
        monkeypatch.setattr(backend, "state", lambda: 1 / 0)
        connection.sendall(REQUEST)
        assert answers.next()[0] == b"500 Internal Server Error"
    assert backend.codes == {200: 1, 500: 1}


def test_a_peer_that_does_not_read_gets_no_more_pages_than_fit(serve, backend):
    ranks = backend.now.ranks
    many = tuple(replace(ranks[0], name=str(number)) for number in range(900))
    backend.now = replace(backend.now, ranks=many)
    with connect(serve()) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        answered = -1
        while answered < backend.codes[200] < 50:
            answered = backend.codes[200]
            connection.sendall(REQUEST)
            deadline = time.monotonic() + 0.5
            while backend.codes[200] == answered and time.monotonic() < deadline:
                time.sleep(0.01)
    assert 2 <= backend.codes[200] < 50


def test_a_page_is_rendered_once_a_second_however_many_ask(backend):
    now = [100.0]
    pages = MetricsPages(backend, clock=lambda: now[0])
    first = pages.page(PLAIN).content
    backend.now = replace(backend.now, ranks=())
    now[0] += 1.0
    assert pages.page(PLAIN).content == first
    now[0] += 0.2
    assert b"warpwatch_steps_total{" not in pages.page(PLAIN).content
    assert b"warpwatch_steps_total{" in first


def test_each_format_has_its_own_page(backend):
    pages = MetricsPages(backend)
    contents = {
        (openmetrics, compressed): pages.page(Format(openmetrics, compressed)).content
        for openmetrics in (False, True)
        for compressed in (False, True)
    }
    assert contents[True, False].endswith(b"# EOF\n")
    assert b"# EOF" not in contents[False, False]
    for openmetrics in (False, True):
        assert gzip.decompress(contents[openmetrics, True]) == contents[openmetrics, False]


def test_pages_are_rendered_ahead_only_for_who_comes_all_the_time(backend):
    now = [100.0]
    rendered = []
    pages = MetricsPages(backend, clock=lambda: now[0])
    state = backend.now

    def render_at() -> Any:
        rendered.append(now[0])
        return state

    backend.state = render_at
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


def test_a_fault_while_rendering_ahead_is_left_to_the_next_scrape(backend):
    now = [100.0]
    pages = MetricsPages(backend, clock=lambda: now[0])
    for now[0] in (100.0, 101.0):
        pages.page(PLAIN)
    backend.state = lambda: 1 / 0
    now[0] = 102.5
    pages.refresh()
    with pytest.raises(ZeroDivisionError):
        pages.page(PLAIN)
