"""What is read from the bus: subjects, batches, heads and states, greetings, requests, replies."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any, cast

import msgspec
from starlette.applications import Starlette

from tests.fleet.nodes import NOW, TestCluster, seen, step
from tests.fuzz.watch import Target
from warpwatch_daemon.for_fleet.bus import BusReplies
from warpwatch_fleet.agent_link import AgentError, BusLinks
from warpwatch_fleet.bus.fleet import Views, WorkerView
from warpwatch_fleet.bus.partition import Head, Partition, StoredJob, target_of
from warpwatch_fleet.bus.sharing import Greeting
from warpwatch_fleet.bus.worker import BusSource
from warpwatch_fleet.config import FleetFile
from warpwatch_runtime.bus import Bucket, Bus, StreamMessage
from warpwatch_telemetry import bus_messages as said
from warpwatch_telemetry.bus_messages import Publisher
from warpwatch_telemetry.errors import Refused
from warpwatch_telemetry.log import encode_line
from warpwatch_telemetry.state import State

# The first byte of an input: what it is, and whether it is packed on the way.
SUBJECT, BATCH, HEAD, STATE, GREETING, REQUEST, REPLY, VIEW = range(8)
PACKED = 8
NODE = Publisher("gpu-1")
RUN = seen(0, 1)
NUMBER = said.partition_of(RUN.job_id)
STORED = StoredJob(RUN.job_id, "0.a.b.0", 1, NOW)
# Nodes and jobs of inputs add up: another partition replaces it then.
INPUTS_OF_A_PARTITION = 256


class Answered:
    """A bucket and a connection whose every answer is ``content``."""

    content = b""

    async def get(self, key: str) -> tuple[bytes, int]:
        return HEADS.get(key, self.content), 1

    async def put(self, key: str, value: bytes, revision: int | None = None) -> int:
        return 1

    async def request(self, subject: str, body: bytes) -> bytes:
        return self.content


HEADS = {"1.head": msgspec.msgpack.encode(Head("w", (STORED,)))}


class OnTheBus:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._number = 0
        self._answered = Answered()
        self._link = BusLinks(cast(Bus, self._answered)).link(target_of(NODE, None))
        self._replies = BusReplies(Starlette())
        self._source = BusSource(FleetFile.model_validate({}), lambda anomalies: None)
        self._cluster = TestCluster().cluster
        self._partition = self._new()

    def _new(self, number: int = NUMBER) -> Partition:
        return Partition(number, self._cluster, cast(Bucket, self._answered), "w")

    def run(self, data: bytes) -> None:
        how, content = (data[:1] or b"\0")[0], data[1:]
        self._number += 1
        if self._number % INPUTS_OF_A_PARTITION == 0:
            self._loop.run_until_complete(self._partition.advance(everything=True))
            self._partition.close()
            self._partition = self._new()
        if how & PACKED:
            content = said.pack(content)
        self._answered.content = content
        self._loop.run_until_complete(self._read(how % PACKED, content))

    async def _read(self, what: int, content: bytes) -> None:
        text = content.decode(errors="replace")
        if what == SUBJECT:
            subject, _, ident = text.partition(" ")
            self._feed(subject, ident, b"")
        elif what == BATCH:
            for subject in (said.records_subject(NUMBER, NODE), said.node_subject(NODE)):
                self._feed(subject, f"boot-{self._number}", content)
        elif what == HEAD:
            await self._new(0).resume()
        elif what == STATE:
            await self._new(1).resume()
        elif what == GREETING:
            self._source._receive(content)
            self._source.shares.to_take({0: 1.0})
            self._source.shares.to_give({0: 1.0})
        elif what == REQUEST:
            operation, _, body = text.partition(" ")
            with contextlib.suppress(ValueError):
                assert (await self._replies.reply(operation, body.encode()))[:3].isdigit()
        elif what == REPLY:
            with contextlib.suppress(AgentError, Refused):
                await self._link.request("captures", {})
        else:
            Views("view", WorkerView, 1.0).read({"w": content})

    def _feed(self, subject: str, ident: str, content: bytes) -> None:
        self._partition.feed(StreamMessage(subject, ident, content, NOW + self._number))
        assert not self._cluster.refused["error"], "a record was not refused in order"


def target(folder: Path) -> Target:
    lines = b"".join(encode_line(one) or b"" for one in (RUN, step(0, 1, NOW)))
    lines += b'{"type":"cursor","cursor":"1","node":"gpu-1"}\n'
    path = said.token("captures/prepare").encode()
    valid: dict[int, Any] = {
        SUBJECT: said.records_subject(NUMBER, NODE).encode() + b" boot-1",
        HEAD: msgspec.msgpack.encode(Head("w", (STORED,))),
        GREETING: msgspec.msgpack.encode(Greeting("other", {1: 2.0})),
        REQUEST: b"post." + path + b" {}",
        REPLY: b'409{"error":{"reason":"refused_busy","detail":"x"}}',
    }
    seeds = [bytes([what]) + content for what, content in valid.items()]
    seeds += [bytes([BATCH | PACKED]) + lines, bytes([BATCH]) + said.pack(lines)]
    view = msgspec.msgpack.encode(WorkerView(State(NOW, "1", "w")))
    seeds += [bytes([VIEW | PACKED]) + view, bytes([STATE | PACKED]) + b"\x80"]
    tokens = (b".", b"nodes", b"-", b"=", b"9" * 400, b"\xff", b"\xc1", b"\x91" * 64, b"\n", b"NaN")
    return Target(OnTheBus().run, seeds, tokens)
