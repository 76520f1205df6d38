"""Real agents' HTTP servers, followed over real connections."""

from __future__ import annotations

import asyncio
import gzip
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.http.conftest import MemoryAgent, Serve, certified, servers
from warpwatch_fleet import following
from warpwatch_fleet.config import AgentsConfig, ShardConfig
from warpwatch_fleet.following import AgentError, Agents
from warpwatch_fleet.targets import Target
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import Step
from warpwatch_telemetry.stream import CursorLine, StreamDecoder

JOB = JobId("ns/team", "llama", "41")


@pytest.fixture
def agent(tmp_path: Path) -> MemoryAgent:
    return MemoryAgent(tmp_path)


@pytest.fixture
def serve(agent: MemoryAgent) -> Iterator[Serve]:
    with servers(agent) as start:
        yield start


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("secret\n")
    return path


def step(number: int) -> Step:
    return Step(1000.0 + number, "llama", 0, number, 1.0)


def target(server: object, **labels: str) -> Target:
    host, port = server.address  # type: ignore[attr-defined]
    return Target(f"{host}:{port}", labels)


def followed(
    config: AgentsConfig, to: Target, take: Callable[[list[bytes]], None], cursor: str | None = None
) -> None:
    async def follow() -> None:
        agents = Agents(config, ShardConfig(), "fleet-0")
        try:
            await agents.follow(to, lambda: cursor, take)
        finally:
            await agents.close()

    asyncio.run(follow())


class Enough(Exception):
    pass


def test_an_agent_that_was_found_by_a_name_is_verified_for_it(serve, tmp_path):
    folder = certified(tmp_path, "warpwatch-peers.monitoring.svc")
    address = target(serve(web_config=folder / "web.yml")).address
    config = AgentsConfig(ca_file=folder / "tls.crt")
    named = Target(address, server_name="warpwatch-peers.monitoring.svc")
    # It is spoken to, and wants a token.
    with pytest.raises(AgentError, match=r"^403"):
        followed(config, named, lambda lines: None)
    with pytest.raises(AgentError, match="certificate verify failed"):
        followed(config, Target(address), lambda lines: None)


def test_lines_come_whole_and_a_cursor_goes_on_where_they_ended(serve, agent, token):
    to = target(serve(token_file=token))
    config = AgentsConfig(token_file=token, allow_plain=True)
    decoder, seen, cursors = StreamDecoder(), [], []

    def take(lines: list[bytes]) -> None:
        for line in lines:
            said = decoder.decode(line)
            if isinstance(said, CursorLine):
                cursors.append(said.cursor)
                agent.stream.put([step(len(cursors))])
            elif isinstance(said, Step):
                seen.append(said.step)
        if len(seen) >= 3:
            raise Enough

    with pytest.raises(Enough):
        followed(config, to, take)
    assert seen == [1, 2, 3]
    seen.clear()
    with pytest.raises(Enough):
        followed(config, to, take, cursors[0])
    assert seen[:3] == [1, 2, 3]


def test_an_agent_that_refuses_says_why_in_one_line(serve, token):
    to = target(serve(token_file=token))
    with pytest.raises(AgentError, match=r"^401: this needs the token of http.token_file: send"):
        followed(AgentsConfig(), to, lambda lines: None)


def test_the_token_is_not_shown_to_a_tenants_own_agent(serve, token):
    to = target(serve(token_file=token), owner="ns/team")
    with pytest.raises(AgentError, match=r"^401"):
        followed(AgentsConfig(token_file=token, allow_plain=True), to, lambda lines: None)


def test_nobody_listens_there():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(AgentError, match="ConnectError"):
        followed(AgentsConfig(), Target(f"127.0.0.1:{port}"), lambda lines: None)


def answering(body: bytes, linger_s: float = 0.0) -> tuple[Target, socket.socket]:
    """Something that is no agent, and says this to whoever comes."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            connection.sendall(body)
            time.sleep(linger_s)

    threading.Thread(target=answer, daemon=True).start()
    return Target(f"127.0.0.1:{listener.getsockname()[1]}"), listener


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"garbage\r\n\r\n", "RemoteProtocolError"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + 1100 * b"x" * 1024, "a line is longer than"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n", "^302"),
        (b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\nno gzip", "^no gzip: "),
    ],
)
def test_what_is_no_agent_is_named_in_one_line(body, said):
    to, listener = answering(body)
    with listener, pytest.raises(AgentError, match=said) as raised:
        followed(AgentsConfig(), to, lambda lines: None)
    assert "\n" not in str(raised.value)


def test_an_agent_that_floods_is_read_no_faster_than_it_may(monkeypatch):
    waits: list[float] = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def batches() -> AsyncIterator[list[bytes]]:
        for _ in range(20):
            yield [b"{}"] * following.MAX_LINES_PER_S

    async def read() -> int:
        count = 0
        async for lines in following._paced(batches()):
            count += len(lines)
        return count

    monkeypatch.setattr(asyncio, "sleep", sleep)
    assert asyncio.run(read()) == 20 * following.MAX_LINES_PER_S
    # Each wait is until the twenty seconds' worth that came at once have passed.
    assert max(waits) > 15


def test_what_is_packed_small_comes_in_portions():
    body = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"\n" * 2**26)
    to, listener = answering(body)
    portions: list[int] = []

    def take(lines: list[bytes]) -> None:
        portions.append(len(lines))
        if len(portions) == 3:
            raise AgentError("enough")

    with listener, pytest.raises(AgentError, match="enough"):
        followed(AgentsConfig(), to, take)
    assert portions == [following.MAX_LINES_PER_S // 10] * 3


def test_a_lease_is_taken_by_name_and_a_refusal_is_told(serve, agent, token):
    to = target(serve(token_file=token))

    async def lease() -> None:
        agents = Agents(AgentsConfig(token_file=token, allow_plain=True), ShardConfig(), "fleet-0")
        try:
            await agents.lease(to, JOB, {"hang": "1-1"})
        finally:
            await agents.close()

    asyncio.run(lease())
    assert agent.leased == [(JOB, "fleet-0", 60.0)]


def asked(config: AgentsConfig, to: Target, path: str) -> Any:
    async def ask() -> Any:
        agents = Agents(config, ShardConfig(), "fleet-0")
        try:
            return await agents.ask(to, path, {"job": "llama"})
        finally:
            await agents.close()

    return asyncio.run(ask())


def test_what_an_agent_refuses_keeps_its_reason_and_what_it_does_not_know_is_an_error(
    serve, agent, token
):
    to, config = target(serve(token_file=token)), AgentsConfig(token_file=token, allow_plain=True)
    assert asked(config, to, "captures/prepare")["begun"] == 412
    agent.refusal = Refused("refused_busy", "rank 0 is being captured")
    with pytest.raises(Refused, match="rank 0 is being captured") as refused:
        asked(config, to, "captures")
    assert refused.value.reason == "refused_busy"
    with pytest.raises(AgentError, match=r"^404: Not Found"):
        asked(config, to, "readiness")
    with pytest.raises(AgentError, match=r"^401: this needs the token"):
        asked(AgentsConfig(), to, "captures")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n<html>", "^200: no JSON"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + 1100 * b"x" * 1024, "an answer is longer than"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{", "^no answer within 0.5 s"),
    ],
)
def test_an_answer_that_is_none_is_named_in_one_line(monkeypatch, body, said):
    monkeypatch.setattr(following, "SILENCE_S", 0.5)
    to, listener = answering(body, linger_s=1.0)
    with listener, pytest.raises(AgentError, match=said):
        asked(AgentsConfig(), to, "captures")
