"""Real agents' HTTP servers, followed over real connections."""

from __future__ import annotations

import asyncio
import gzip
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from tests.daemon.http.certificates import make_certificate
from tests.daemon.http.conftest import MemoryAgent, Serve, certified, servers
from tests.fleet.nodes import NOW, TestCluster, TestNode
from tests.manual_clock import ManualClock
from warpwatch_fleet import agent_link, source
from warpwatch_fleet.agent_link import AgentError, HttpLinks
from warpwatch_fleet.config import AgentsConfig, FleetConfig
from warpwatch_fleet.source import AgentFollower
from warpwatch_fleet.targets import Target, Targets
from warpwatch_serving.server import Server
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.jobs import JobId
from warpwatch_telemetry.records import Step
from warpwatch_telemetry.stream import CursorLine, decode_stream_line

JOB = JobId("ns/team", "llama", "41")


@pytest.fixture
def agent(tmp_path: Path) -> MemoryAgent:
    return MemoryAgent(tmp_path)


@pytest.fixture
def serve(agent: MemoryAgent) -> Iterator[Serve]:
    with servers(agent) as start:
        yield start


@pytest.fixture
def config(tmp_path: Path) -> AgentsConfig:
    (tmp_path / "token").write_text("secret\n")
    return AgentsConfig(token_file=tmp_path / "token", allow_plain=True)


@pytest.fixture
def to(serve: Serve, config: AgentsConfig) -> Target:
    return target(serve(token_file=config.token_file))


def target(server: Server) -> Target:
    return Target("{}:{}".format(*server.address))


def with_agents(config: AgentsConfig, work: Callable[[HttpLinks], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        agents = HttpLinks(config, "fleet-0")
        try:
            return await work(agents)
        finally:
            await agents.close()

    return asyncio.run(run())


def followed(
    config: AgentsConfig, to: Target, take: Callable[[list[bytes]], None], cursor: str | None = None
) -> None:
    with_agents(config, lambda agents: agents.link(to).follow(cursor, take))


def asked(config: AgentsConfig, to: Target, path: str) -> Any:
    return with_agents(config, lambda agents: agents.link(to).request(path, {"job": "llama"}))


class Enough(Exception):
    pass


def stop(lines: list[bytes]) -> None:
    raise Enough


def test_an_agent_that_was_found_by_a_name_is_verified_for_it(serve, tmp_path):
    name = "warpwatch-peers.monitoring.svc"
    folder = certified(tmp_path, name)
    address = target(serve(web_config=folder / "web.yml")).address
    config = AgentsConfig(ca_file=folder / "tls.crt")
    # It is spoken to, and wants a token.
    for to, said in (
        (Target(address, server_name=name), "^401"),
        (Target(address), "verify failed"),
    ):
        with pytest.raises(AgentError, match=said):
            followed(config, to, stop)

    async def follow(links: HttpLinks) -> None:
        (folder / "ca.crt").write_bytes((folder / "tls.crt").read_bytes())
        await links.renew()
        link = links.link(Target(address, server_name=name))
        with pytest.raises(AgentError, match="401 for a"):
            await asyncio.to_thread(lambda: list(link.download("a")))
        await link.follow(None, stop)

    # Its authority is renewed while the fleet runs.
    make_certificate(folder, "ca")
    with pytest.raises(AgentError, match="401: "):
        with_agents(AgentsConfig(ca_file=folder / "ca.crt"), follow)


def test_lines_come_whole_and_a_cursor_goes_on_where_they_ended(agent, config, to):
    seen, cursors = [], []

    def take(lines: list[bytes]) -> None:
        for line in lines:
            said = decode_stream_line(line)
            if isinstance(said, CursorLine):
                cursors.append(said.cursor)
                number = len(cursors)
                agent.stream.put([Step(1000.0 + number, "llama", 0, number, 1.0)])
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


def test_an_agent_that_refuses_says_why_and_a_tenants_own_is_not_shown_the_token(config, to):
    own, file = Target(to.address, {"owner": "ns/team"}), config.token_file
    others = AgentsConfig(owner_token_files={"ns/other": file}, allow_plain=True)
    for agents, address in ((AgentsConfig(), to), (config, own), (others, own), (others, to)):
        with pytest.raises(AgentError, match=r"^401: over TCP .* or send `Authorization: Bearer"):
            followed(agents, address, stop)
    with pytest.raises(Enough):
        followed(AgentsConfig(owner_token_files={"ns/team": file}, allow_plain=True), own, stop)

    async def without_file(links: HttpLinks) -> None:
        file.unlink()
        await links.link(to).follow(None, stop)

    with pytest.raises(AgentError, match=r"^fleet\.agents\.token_file .*: No such file"):
        with_agents(config, without_file)


@contextmanager
def answering(body: bytes) -> Iterator[Target]:
    """Run a server that sends this to the first peer and holds the connection."""
    over, requests = threading.Event(), list[bytes]()

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            requests.append(connection.recv(65536).lower())
            with suppress(OSError):
                connection.sendall(body)
                if not body.endswith(b"{"):
                    connection.shutdown(socket.SHUT_WR)
            over.wait()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield Target(f"127.0.0.1:{listener.getsockname()[1]}")
        finally:
            over.set()
            thread.join()
    # No other encoding is read. The peer of a client that gives up at once may read nothing.
    assert body.endswith(b"{") or b"\r\naccept-encoding: gzip\r\n" in requests[0]


OK, LONG = b"HTTP/1.1 200 OK\r\n", b"\r\n" + 1100 * b"x" * 1024
FOLLOWED, ASKED = (followed, stop), (asked, "captures")


@pytest.mark.parametrize(
    ("how", "body", "said"),
    [
        (FOLLOWED, b"garbage\r\n\r\n", "RemoteProtocolError"),
        (FOLLOWED, OK + LONG, "a line is longer than"),
        (FOLLOWED, b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1/\r\n\r\n", "^302"),
        (FOLLOWED, OK + b"Content-Encoding: gzip\r\n\r\nno gzip", "^no gzip: "),
        (ASKED, OK + b"Content-Length: 6\r\n\r\n<html>", "^200: no JSON"),
        (ASKED, OK + LONG, "an answer is longer than"),
        (ASKED, OK + b"Content-Length: 9\r\n\r\n{", "^no answer within 0.1 s"),
        (FOLLOWED, OK + b"Content-Length: 9\r\n\r\n{", "^it was silent for 0.1 s"),
    ],
)
def test_what_is_no_agents_answer_is_named_in_one_line(monkeypatch, how, body, said):
    work, what = how
    if said.endswith("0.1 s"):
        monkeypatch.setattr(agent_link, "SILENCE_S" if how is FOLLOWED else "ANSWER_S", 0.1)
    with answering(body) as to, pytest.raises(AgentError, match=said) as raised:
        work(AgentsConfig(), to, what)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("lines", "expected_s"),
    [
        # 5,000 lines of two bytes per second, or 4 MiB per second; ten seconds are saved.
        ([b"{}"] * 5000, 1.0),
        ([b"x" * 2**19] * 16, 2.0),
    ],
)
def test_an_agent_that_floods_is_read_no_faster_than_it_may(lines, expected_s):
    clock, times = ManualClock(), []

    async def batches() -> AsyncIterator[list[bytes]]:
        clock.advance(100)
        for _ in range(20):
            yield lines

    async def sleep(seconds: float) -> None:
        clock.sleep(seconds)

    async def read() -> int:
        count = 0
        async for portion in agent_link._paced(batches(), clock.monotonic, sleep):
            assert len(portion) <= 500
            count += len(portion)
            times.append(clock.monotonic())
        return count

    assert asyncio.run(read()) == 20 * len(lines)
    assert clock.monotonic() - times[0] == pytest.approx(20 * expected_s - 10.0)


def test_what_is_packed_small_comes_in_portions():
    body = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n" + gzip.compress(b"\n" * 2**24)
    portions: list[int] = []

    def take(lines: list[bytes]) -> None:
        portions.append(len(lines))
        if len(portions) == 3:
            raise AgentError("enough")

    with answering(body) as to, pytest.raises(AgentError, match="enough"):
        followed(AgentsConfig(), to, take)
    assert portions == [500] * 3


def test_a_lease_is_taken_by_name(agent, config, to):
    with_agents(config, lambda agents: agents.link(to).lease(JOB, {"hang": "1-1"}))
    assert agent.leased == [(JOB, "fleet-0", 60.0)]


def test_what_an_agent_refuses_keeps_its_reason_and_what_it_does_not_know_is_an_error(
    agent, config, to
):
    assert asked(config, to, "captures/prepare")["begun"] == 412
    agent.refusal = Refused("refused_busy", "rank 0 is being captured")
    with pytest.raises(Refused, match="rank 0 is being captured") as refused:
        asked(config, to, "captures")
    assert refused.value.reason == "refused_busy"
    with pytest.raises(AgentError, match=r"^404: Not Found"):
        asked(config, to, "readiness")
    with pytest.raises(AgentError, match=r"^401: over TCP this needs"):
        asked(AgentsConfig(), to, "captures")


@pytest.mark.parametrize(
    ("encoding", "content"),
    [("gzip, gzip", gzip.compress(gzip.compress(b"0" * 2**24))), ("br", b"packed")],
)
def test_an_answer_that_is_packed_otherwise_is_refused(encoding, content):
    body = f"HTTP/1.1 200 OK\r\nContent-Encoding: {encoding}\r\n\r\n".encode() + content
    with answering(body) as to, pytest.raises(AgentError, match="was not asked for"):
        asked(AgentsConfig(), to, "captures")
    with answering(body) as to, pytest.raises(AgentError, match="was not asked for"):
        with_agents(AgentsConfig(), lambda agents: downloaded(agents, to))


def test_a_file_is_unpacked_in_portions():
    packed = gzip.compress(b"0" * 2**24)
    head = f"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {len(packed)}\r\n\r\n"
    with answering(head.encode() + packed) as to:
        parts = with_agents(AgentsConfig(), lambda agents: downloaded(agents, to))
    assert (sum(map(len, parts)), max(map(len, parts))) == (2**24, 2**20)


async def downloaded(agents: HttpLinks, to: Target) -> list[bytes]:
    return await asyncio.to_thread(lambda: list(agents.link(to).download("captures/1/trace")))


def test_an_agent_is_followed_again_later_and_later_until_it_has_answered_for_long(monkeypatch):
    monkeypatch.setattr(source, "SILENCE_S", 10.0)
    monkeypatch.setattr(random, "uniform", lambda low, high: high)
    clock, said = ManualClock(), list[str]()
    # How long each connection lasts; 0: it is refused.
    lasts = iter([0.0] * 6 + [10.0, 10.1, 0.0])
    cluster, agent, known = TestCluster().cluster, TestNode("gpu-1"), list[bool]()

    class PlayedAgents:
        def link(self, to: Target) -> PlayedAgents:
            return self

        async def follow(self, cursor: str | None, take: Any) -> None:
            known.append(cursor is not None)
            after_s = next(lasts, None)
            if after_s is None:
                raise asyncio.CancelledError
            if after_s == 0.0:
                raise AgentError("refused") if len(said) % 2 else RuntimeError("a fault of ours")
            agent.name += "0"  # another one has the address now
            take(agent.lines(clock.wall()))
            clock.advance(after_s)

    async def sleep(seconds: float) -> None:
        said.extend("up" if node.up else node.reason for node in cluster.nodes.values())
        clock.sleep(seconds)

    async def follow() -> None:
        targets, agents = Targets(FleetConfig(targets=("gpu-1:9400",))), cast(Any, PlayedAgents())
        followed = AgentFollower(targets, agents, cluster, clock.monotonic, clock.wall, sleep)
        await followed.refresh()
        await asyncio.gather(*followed.tasks, return_exceptions=True)

    asyncio.run(follow())
    assert clock.slept == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 1.0, 2.0]
    ours = "following failed: RuntimeError: a fault of ours"
    assert said == [ours, "refused"] * 3 + ["the agent has ended the stream"] * 2 + [ours]
    assert known == [False] * 7 + [True] * 3


def test_agents_are_followed_while_they_are_targets_and_of_two_with_one_name_the_first():
    clock = ManualClock(wall=NOW)
    first, second = TestNode("gpu-1"), TestNode("gpu-1", address="gpu-9:9400")
    targets = Targets(FleetConfig(targets=(first.address, second.address)))
    cluster = TestCluster().cluster
    cursors: list[str | None] = []

    class PlayedAgents:
        def link(self, to: Target) -> PlayedAgents:
            self.to = to
            return self

        async def follow(self, cursor: str | None, take: Any) -> None:
            cursors.append(cursor)
            take((first if self.to.address == first.address else second).lines(clock.wall()))
            await asyncio.Event().wait()

    async def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        await asyncio.sleep(0)

    async def follow() -> None:
        agents: Any = PlayedAgents()
        followed = AgentFollower(targets, agents, cluster, clock.monotonic, clock.wall, sleep)
        await followed.refresh()
        while len(cursors) < 4:
            await asyncio.sleep(0)
        assert [(node.up, node.reason) for node in cluster.nodes.values()] == [
            (True, ""),
            (False, "another agent says that it is on gpu-1"),
        ]
        # An agent that is an owner's now is another one.
        tasks, found = (
            list(followed.tasks),
            targets.read() | {first.address: Target(first.address, {"owner": "a"})},
        )
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(targets, "read", lambda: found)
            await followed.refresh()
        assert {*followed.tasks} - {*tasks} and {*tasks} - {*followed.tasks}
        tasks += followed.tasks
        targets._config = FleetConfig()
        await followed.refresh()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (list(followed.tasks), cluster.nodes) == ([], {})

    asyncio.run(follow())
    # Nothing of the second is believed, so it is read from the start again.
    assert cursors[:3] == [None, None, None]
