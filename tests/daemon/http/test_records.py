"""`/api/v1/records` over real connections."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.daemon.http.conftest import NOW
from tests.waiting import eventually
from warpwatch_daemon.http import records
from warpwatch_telemetry.records import Step
from warpwatch_telemetry.stream import CursorLine, StreamDecoder

PATH = "/api/v1/records"


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """A follower waits for no more than it has to."""
    monkeypatch.setattr(records, "INTERVAL_S", 0.01)


def lines_of(answer: httpx.Response) -> list[Any]:
    return [json.loads(line) for line in answer.text.splitlines()]


def step(number: int) -> Step:
    return Step(1000.0 + number, "llama", 0, number, 1.0)


def follow(client: httpx.Client, cursor: str) -> Any:
    return client.stream("GET", PATH, params={"follow": "true", "after": cursor})


def until(lines: Iterator[str], kind: str) -> Any:
    return next(line for text in lines if (line := json.loads(text))["type"] == kind)


def test_a_batch_ends_with_the_clock_and_a_cursor_that_goes_on(client, agent):
    (clock, cursor) = lines_of(client.get(PATH))
    assert clock == {"type": "clock", "time": NOW}
    assert (cursor["node"], cursor["version"]) == (agent.now.hostname, agent.now.version)
    agent.stream.put([step(1)])
    answer = client.get(PATH, params={"after": cursor["cursor"]})
    assert [line["type"] for line in lines_of(answer)] == ["step", "clock", "cursor"]
    decoder = StreamDecoder()
    decoded = [decoder.decode(line) for line in answer.content.splitlines()]
    assert decoded[0] == step(1)
    assert isinstance(decoded[-1], CursorLine)


def test_a_follower_gets_each_step_as_it_comes_also_compressed(client, agent):
    cursor = lines_of(client.get(PATH))[-1]["cursor"]
    with follow(client, cursor) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        lines = answer.iter_lines()
        for number in range(3):
            agent.stream.put([step(number)])
            assert until(lines, "step")["step"] == number


def test_so_many_may_follow_and_one_that_leaves_makes_room(client, monkeypatch):
    monkeypatch.setattr(records, "MAX_FOLLOWERS", 1)
    cursor = lines_of(client.get(PATH))[-1]["cursor"]

    def is_followed() -> bool:
        with follow(client, cursor) as answer:
            if answer.status_code != 200:
                return False
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
