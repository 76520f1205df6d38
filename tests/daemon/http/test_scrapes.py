"""Scrapes over a kept connection, how old a page may be, and `/api/v1/records`."""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.cases import cases
from tests.daemon.http.conftest import NOW, TIMEOUT_S
from tests.manual_clock import ManualClock
from tests.waiting import eventually
from warpwatch_daemon.for_fleet import api, record_stream
from warpwatch_serving.metrics import MetricsPages
from warpwatch_telemetry.records import Step
from warpwatch_telemetry.stream import CursorLine, decode_stream_line

PLAIN = False, False


@pytest.mark.parametrize(
    "headers", [{}, {"Accept-Encoding": "gzip"}, {"Accept": "application/openmetrics-text"}]
)
def test_a_kept_connection_is_answered_in_the_same_way_until_a_fault(
    serve, agent, headers, monkeypatch
):
    # A page that is rendered ahead between two scrapes would count the first of them.
    monkeypatch.setattr("warpwatch_serving.metrics.AHEAD_INTERVAL_S", -1.0)
    clock = ManualClock()
    host, port = serve({"monotonic": clock.monotonic}).address
    kept = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)

    def scrape() -> tuple[int, list[tuple[str, str]], bytes]:
        kept.request("GET", "/metrics", headers=headers)
        answer = kept.getresponse()
        sent = [header for header in answer.getheaders() if header[0] != "date"]
        return answer.status, sent, answer.read()

    first, second, third = (scrape() for _ in range(3))
    assert first == second == third
    assert first[0] == 200 and ("x-content-type-options", "nosniff") in first[1]
    clock.advance(60)
    agent.exported = lambda: 1 / 0
    assert scrape()[0] == 500
    assert agent.codes == {200: 3, 500: 1}
    kept.close()


@pytest.mark.parametrize(("actions", "rendered_at"), cases(__file__)["pages"].items())
def test_a_page_is_as_old_as_its_scraper_allows(agent, actions, rendered_at):
    """s: a scrape, r: the refresh of each second, and the time in seconds."""
    now, rendered, state = [0.0], [], agent.now

    def exported() -> Any:
        rendered.append(now[0])
        return state

    agent.exported = exported
    pages = MetricsPages(agent, lambda: now[0])
    for action in actions.split():
        now[0] = float(action[1:])
        pages.refresh() if action[0] == "r" else pages.page(*PLAIN)
    assert rendered == rendered_at


def test_a_fault_while_rendering_ahead_is_left_to_the_next_scrape(agent):
    clock = ManualClock()
    pages = MetricsPages(agent, clock.monotonic)
    for _ in range(2):
        pages.page(*PLAIN)
        clock.advance(1.2)
    agent.exported = lambda: 1 / 0
    pages.refresh()
    with pytest.raises(ZeroDivisionError):
        pages.page(*PLAIN)


PATH = "/api/v1/records"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A follower waits for no more than it has to."""
    monkeypatch.setattr(api, "INTERVAL_S", 0.01)


def lines_of(answer: httpx.Response) -> list[Any]:
    return [json.loads(line) for line in answer.text.splitlines()]


def step(number: int) -> Step:
    return Step(1000.0 + number, "llama", 0, number, 1.0)


def follow(client: httpx.Client, cursor: str) -> Any:
    return client.stream("GET", PATH, params={"follow": "true", "after": cursor})


def until(lines: Iterator[str], kind: str) -> Any:
    return next(line for text in lines if (line := json.loads(text))["type"] == kind)


def test_a_batch_ends_with_the_clock_and_a_cursor_that_goes_on(client, agent, monkeypatch):
    (clock, cursor) = lines_of(client.get(PATH))
    assert clock == {"type": "clock", "time": NOW}
    assert (cursor["node"], cursor["version"]) == (agent.now.hostname, agent.now.version)
    agent.stream.put([step(1)])
    answer = client.get(PATH, params={"after": cursor["cursor"]})
    assert [line["type"] for line in lines_of(answer)] == ["step", "clock", "cursor"]
    decoded = [decode_stream_line(line) for line in answer.content.splitlines()]
    assert decoded[0] == step(1)
    assert isinstance(decoded[-1], CursorLine)
    told = [client.get(PATH, params={"shard": f"{index}/2"}).text for index in (0, 1)]
    assert sum('"step"' in text for text in told) == 1
    # The clock says that everything has been sent.
    monkeypatch.setattr(record_stream, "MAX_BATCH_BYTES", 1)
    agent.stream.put([step(2), step(3)])
    lines = lines_of(client.get(PATH, params={"after": decoded[-1].cursor}))
    assert [line["type"] for line in lines] == ["step", "cursor", "step", "clock", "cursor"]


def test_so_many_may_follow_and_one_that_leaves_makes_room(client, monkeypatch):
    monkeypatch.setattr(api, "MAX_FOLLOWERS", 1)
    cursor = lines_of(client.get(PATH))[-1]["cursor"]

    def is_followed() -> bool:
        with follow(client, cursor) as answer:
            if answer.status_code != 200:
                return False
            assert answer.headers["content-encoding"] == "gzip"
            refused = client.get(PATH, params={"follow": "true"})
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "10")
            assert client.get(PATH).status_code == 200
            return True

    # A follower of another test may be about to leave.
    eventually(is_followed, "no place of a follower")
    eventually(is_followed, "the follower that left keeps its place")


def test_a_stream_that_is_closed_ends_for_its_followers(client, agent):
    with client.stream("GET", PATH, params={"follow": "true"}) as answer:
        lines = answer.iter_lines()
        until(lines, "cursor")
        agent.stream.close()
        list(lines)
        assert answer.is_stream_consumed
