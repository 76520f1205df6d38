"""`/api/v1/records` over real connections."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from warpwatch_daemon.http import records
from warpwatch_telemetry.records import Step
from warpwatch_telemetry.stream import CursorLine, StreamDecoder

PATH = "/api/v1/records"


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
    assert abs(clock["time"] - time.time()) < 30
    assert cursor["node"] == agent.state().hostname
    assert cursor["version"] == agent.state().version
    agent.stream.put([step(1)])
    lines = lines_of(client.get(PATH, params={"after": cursor["cursor"]}))
    assert [line["type"] for line in lines] == ["step", "clock", "cursor"]


def test_a_follower_gets_each_step_as_it_comes_also_compressed(client, agent):
    cursor = lines_of(client.get(PATH))[-1]["cursor"]
    with follow(client, cursor) as answer:
        assert answer.headers["content-encoding"] == "gzip"
        lines = answer.iter_lines()
        for number in range(3):
            agent.stream.put([step(number)])
            assert until(lines, "step")["step"] == number


def test_what_is_streamed_can_be_decoded(client, agent):
    client.get(PATH)
    agent.stream.put([step(1)])
    decoder = StreamDecoder()
    decoded = [decoder.decode(line) for line in client.get(PATH).content.splitlines()]
    assert decoded[0] == step(1)
    assert isinstance(decoded[-1], CursorLine)


@pytest.mark.parametrize(
    ("query", "detail"),
    [
        ({"after": "yesterday"}, "query: after: a cursor of this stream is needed"),
        ({"shard": "2/2"}, "there is no 2 of 2; they count from 0"),
        ({"shard": "x"}, "shard"),
    ],
)
def test_a_bad_query_is_named(client, query, detail):
    answer = client.get(PATH, params=query)
    assert answer.status_code == 400
    assert detail in answer.json()["error"]["detail"]


def test_all_jobs_are_nobodys_to_read_without_the_token(tcp, serve, tmp_path):
    assert tcp.get(PATH).status_code == 403
    token = tmp_path / "token"
    token.write_text("secret")
    server = serve(token_file=token)
    assert httpx.get(server.url + "api/v1/records").status_code == 401
    bearer = {"Authorization": "Bearer secret"}
    assert httpx.get(server.url + "api/v1/records", headers=bearer).status_code == 200


def test_so_many_may_follow_and_one_that_leaves_makes_room(client, monkeypatch):
    monkeypatch.setattr(records, "MAX_FOLLOWERS", 1)
    cursor = lines_of(client.get(PATH))[-1]["cursor"]
    with follow(client, cursor):
        answer = client.get(PATH, params={"follow": "true"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "10")
        assert client.get(PATH).status_code == 200
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with follow(client, cursor) as answer:
            if answer.status_code == 200:
                return
        time.sleep(0.1)
    pytest.fail("the follower that left keeps its place")


def test_a_server_that_stops_does_not_wait_for_its_followers(serve, agent):
    token = agent.folder / "token"
    token.write_text("secret")
    server = serve(token_file=token)
    bearer = {"Authorization": "Bearer secret"}
    with (
        httpx.Client(base_url=server.url, headers=bearer) as asking,
        asking.stream("GET", PATH, params={"follow": "true"}) as answer,
    ):
        lines = answer.iter_lines()
        until(lines, "cursor")
        agent.stream.close()
        list(lines)
        assert answer.is_stream_consumed
