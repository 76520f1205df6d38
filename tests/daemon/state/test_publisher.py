"""Messages of an agent on the bus: to whom, in which round, and its replies."""

import asyncio
import os
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, call

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from tests.daemon.state.counted import counted
from tests.manual_clock import ManualClock
from warpwatch_daemon.for_fleet import bus
from warpwatch_daemon.for_fleet.bus import BusReplies, RecordPublisher
from warpwatch_daemon.for_fleet.record_stream import RecordStream
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.bus import BusConfig, BusError
from warpwatch_telemetry import bus_messages as said
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.records import DeviceReading, End, RankSeen, Step

NOW = 1_700_000_000.0
OWN: Any = {"job": "llama", "owner": "ns/team"}
FAULT = Anomaly(NOW, "critical", "!", device="GPU-1", id="x", kind="xid", **OWN)


class Node:
    """An agent's stream and publisher; ``round`` returns its messages, a line each."""

    def __init__(self) -> None:
        self.clock, self.sent, self.is_away = ManualClock(wall=NOW), list[str](), False
        self.stream, self.metrics = RecordStream(self.clock.monotonic), AgentMetrics()
        link: Any = SimpleNamespace(publish=self.publish)
        self.publisher = RecordPublisher(
            self.stream, link, said.Publisher("gpu-1"), "0.3.0", self.metrics,
            self.clock.monotonic, self.clock.wall,
        )  # fmt: skip

    async def publish(self, subject: str, content: bytes, ident: str) -> None:
        if self.is_away:
            raise BusError("away")
        lines = [re.sub(rb'"(\w{8})-', b'"-', one).decode() for one in said.unpack(content)]
        number = said.read_batch_id(ident).number
        self.sent += [f"{number} {subject}", *(f"    {line[:150].strip()}" for line in lines)]

    def round(self, after_s: float, *records: Any) -> str:
        self.clock.advance(after_s)
        self.stream.put(records)
        try:
            asyncio.run(self.publisher.advance())
        except BusError as error:
            self.sent.append(str(error))
        text, self.sent = "\n".join(self.sent), []
        hub: Any = SimpleNamespace(metrics=self.metrics)
        counts = [counted(hub, "bus_messages_total", one) for one in ("sent", "failed")]
        counts.append(counted(hub, "bus_lines_lost_total"))
        return f"after {after_s:g} s: {counts}\n{text}\n"


def test_what_is_published_round_by_round_is_golden(golden_case, monkeypatch):
    node, text = Node(), ""
    seen = [RankSeen(NOW, job, 0, 1, owner="ns/team") for job in ("llama", "chat")]
    device = DeviceReading(NOW, "GPU-1", {})
    text += node.round(0, *seen, device)
    node.stream.put_anomaly(FAULT)
    text += node.round(1, Step(NOW + 1, "llama", 0, 1, 1.0, owner="ns/team"))
    # Nothing is new, then a clock is due, then what lives.
    for after_s in (1, 2.5, 1, 15):
        text += node.round(after_s)
    node.stream.put_anomaly(replace(FAULT, end_time=NOW + 2))
    # An old clock is not sent, and the order stays.
    node.is_away = True
    text += node.round(5, End(NOW + 25, "llama", 0, owner="ns/team"))
    node.is_away = False
    text += node.round(1, Step(NOW + 26, "chat", 0, 2, 1.0, owner="ns/team"))
    # All partitions that had records learn of the loss, also that of the ended job.
    step = Step(NOW + 27, "chat", 0, 3, 1.0, owner="ns/team")
    node.stream.put([step, step, step])
    text += node.round(601, step)
    # More than a batch: its last message alone has the clock.
    monkeypatch.setattr("warpwatch_daemon.for_fleet.record_stream.MAX_BATCH_BYTES", 300)
    monkeypatch.setattr(bus, "MAX_BATCH_BYTES", 300)
    text += node.round(21, *[step] * 4)
    golden_case(text)


@pytest.mark.parametrize(
    ("operation", "status"),
    [
        ("post.leases", 200), ("get.captures/c-1/rank0.json", 200), ("put.leases", 404),
        ("post.leases/../captures", 404), ("post.captures/c-1/cancel/more", 404),
    ],
)  # fmt: skip
def test_a_request_over_the_bus_is_one_of_the_api_and_no_other(operation, status, monkeypatch):
    async def show(request: Request) -> JSONResponse:
        peer = request.scope["state"]["peer"]
        about = [request.method, request.url.path, (await request.body()).decode()]
        return JSONResponse([*about, peer.name, peer.uid == os.getuid(), peer.privileged])

    method, _, path = operation.partition(".")
    replies = BusReplies(Starlette(routes=[Route("/{path:path}", show, methods=["GET", "POST"])]))
    asked = f"{method}.{said.token(path)}"
    answer = asyncio.run(replies.reply(asked, b"{}")).decode()
    expected = f'["{method.upper()}","/api/v1/{path}","{{}}","bus",true,true]'
    if status == 404:
        assert answer.startswith('404{"error":{"reason":"not_found"')
    else:
        assert answer == f"200{expected}"
        monkeypatch.setattr(bus, "MAX_ANSWER_BYTES", len(expected) + 2)
        with pytest.raises(ValueError, match="not over the bus"):
            asyncio.run(replies.reply(asked, b"{}"))


def test_the_last_lines_are_published_before_the_agent_leaves_the_bus(monkeypatch):
    node, link, who = Node(), AsyncMock(is_closed=False), said.Publisher("gpu-1", "ns/own")
    monkeypatch.setattr(bus, "Bus", named := Mock(return_value=link))
    config = BusConfig(url="nats://127.0.0.1:9", owner="ns/own")
    about: Any = (config, "gpu-1", "0.3.0", node.stream, Starlette(), node.metrics)
    agent = bus.BusAgent(*about)
    # It comes from another thread, at any moment.
    link.serve.side_effect = lambda *_: agent.close()
    link.publish.side_effect = [BusError("away"), *[None] * 9]
    # A run after the end does nothing.
    agent.run()
    agent.run()
    assert named.call_args == call(config, "agent.NZZS633XNY.M5YHKLJR")
    names = [name for name, *_ in link.mock_calls]
    assert [*names[:3], names[-1]] == ["connect", "serve", "publish", "close"]
    assert (names.count("connect"), names.count("publish")) == (1, 2)
    assert link.serve.call_args == call(who.requests, agent._replies.reply)
    assert link.publish.call_args[0][0] == said.node_subject(who)
