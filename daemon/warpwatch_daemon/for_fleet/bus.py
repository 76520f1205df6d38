"""The agent on the bus: publishes its records, and answers the fleet's requests.

It runs in a loop of its own and reads the stream as a follower does: if the bus fails, neither
a training nor a scrape waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from starlette.types import ASGIApp, Message

from warpwatch_daemon.for_fleet.record_stream import MAX_BATCH_BYTES, Portion, RecordStream
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.bus import Bus, BusConfig, BusError
from warpwatch_serving.connection import Peer
from warpwatch_telemetry import bus_messages as said
from warpwatch_telemetry.bus_messages import PARTITIONS, BatchId, Publisher
from warpwatch_telemetry.log import encode_line
from warpwatch_telemetry.records import Clock
from warpwatch_telemetry.stream import CursorLine, encode_stream_line

PUBLISH_INTERVAL_S = 1.0
# A reader that begins in the middle of the stream knows all live ranks after this time.
LIVE_INTERVAL_S = 20.0
_PATH = re.compile(r"leases|captures|captures/prepare|captures/[\w-]{1,64}/(cancel|[\w.#-]{1,200})")
_ANOMALY = b'{"type":"anomaly"'
_CLOCK = re.compile(rb'\{"type":"clock"[^\n]*\n')
_GAP = re.compile(rb'{"type":"gap","lost":(\d+)}')
# Half a minute of what an agent of many short steps says.
MAX_ANSWER_BYTES = 64 * 2**20


class RecordPublisher:
    """Publishes the stream's lines: those of a job to its partition, those of the node to nodes.

    Faults of devices go to the partitions of the jobs that run here, too. Lines that were not
    published are sent again; while the bus is away, the stream's buffer fills and drops the oldest.
    """

    def __init__(
        self,
        stream: RecordStream,
        bus: Bus,
        who: Publisher,
        version: str,
        metrics: AgentMetrics,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._stream = stream
        self.bus = bus
        self._who = who
        self._version = version
        self._monotonic = monotonic
        self._wall = wall
        self._cursor: str | None = None
        self._boot = os.urandom(8).hex()
        self._count = 0
        self._live_at = float("-inf")
        # Subject, lines and id of what is not published yet.
        self._unsent: deque[tuple[str, bytes, str]] = deque()
        messages = metrics.counter("bus_messages_total")
        self._sent, self._failed = messages.labels("sent"), messages.labels("failed")
        self._lost = metrics.counter("bus_lines_lost_total")

    async def advance(self) -> None:
        """Publish what is new. Raises BusError; the next call goes on where this one ended."""
        more = True
        while more:
            if not self._unsent:
                portion = self._stream.portion(self._cursor)
                self._unsent.extend(self._messages(portion))
                self._cursor, more = portion.cursor, portion.more
            while self._unsent:
                subject, lines, ident = self._unsent[0]
                try:
                    await self.bus.publish(subject, said.pack(lines), ident)
                except BusError:
                    self._failed.inc()
                    # A clock that comes late would shift all times.
                    left = ((to, _CLOCK.sub(b"", lines), own) for to, lines, own in self._unsent)
                    self._unsent = deque(left)
                    raise
                self._sent.inc()
                self._unsent.popleft()

    def _messages(self, portion: Portion) -> Iterator[tuple[str, bytes, str]]:
        own = sorted({key % PARTITIONS for key in self._stream.live_keys()})
        by_partition: dict[int, list[bytes]] = {partition: [] for partition in own}
        of_node: list[bytes] = []
        lines = portion.lines
        if self._monotonic() - self._live_at >= LIVE_INTERVAL_S and not portion.more:
            self._live_at = self._monotonic()
            lines = [*lines, *self._live(own)]
        for key, line in lines:
            if key is not None:
                by_partition.setdefault(key % PARTITIONS, []).append(line)
                continue
            of_node.append(line)
            if lost := _GAP.match(line):
                self._lost.inc(int(lost[1]))
            if line.startswith(_ANOMALY):
                for partition in own:
                    by_partition[partition].append(line)
        # By the clock, the fleet knows until when it has everything.
        end = b"" if portion.more else encode_line(Clock(self._wall())) or b""
        end += encode_stream_line(CursorLine(portion.cursor, self._who.node, self._version))
        yield from self._numbered(said.node_subject(self._who), of_node, end)
        for partition, own_lines in by_partition.items():
            yield from self._numbered(said.records_subject(partition, self._who), own_lines, end)

    def _live(self, own: Iterable[int]) -> list[tuple[int | None, bytes]]:
        """Return the lines of what lives, those of devices for each partition of a job here."""
        live = self._stream.live()
        devices = [line for key, line in live if key is None and not line.startswith(_ANOMALY)]
        return [*live, *((partition, line) for partition in own for line in devices)]

    def _numbered(
        self, subject: str, lines: list[bytes], end: bytes
    ) -> Iterator[tuple[str, bytes, str]]:
        for content in said.portions([*lines, end], MAX_BATCH_BYTES):
            self._count += 1
            yield subject, content, str(BatchId(self._boot, self._count))


class BusAnswers:
    """Answers requests as the HTTP API does for a holder of the token: it is the same code."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def answer(self, operation: str, content: bytes) -> bytes:
        """Return the reply: its status in three digits, then its body."""
        method, _, path = operation.partition(".")
        path = said.name_of(path)
        if method not in ("get", "post") or not _PATH.fullmatch(path):
            return b"404" + b'{"error":{"reason":"not_found","detail":"no such request"}}'
        return await self._asked(method.upper(), f"/api/v1/{path}", content)

    async def _asked(self, method: str, path: str, content: bytes) -> bytes:
        # The permissions on the bus decide which clients may send requests.
        peer = Peer("bus", os.getuid(), privileged=True, on_socket=True)
        headers = [(b"content-type", b"application/json"), (b"host", b"bus")]
        scope: dict[str, Any] = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1", "method": method,
            "scheme": "http", "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "server": ("bus", 0), "client": None, "state": {"peer": peer},
            "headers": [*headers, (b"content-length", str(len(content)).encode())],
        }  # fmt: skip
        parts = [b"500"]
        size, is_read = 0, False

        async def receive() -> Message:
            nonlocal is_read
            if is_read:
                # Nobody disconnects here.
                await asyncio.get_running_loop().create_future()
            is_read = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def send(message: Message) -> None:
            nonlocal size
            if message["type"] == "http.response.start":
                parts[0] = str(message["status"]).encode()
            elif message["type"] == "http.response.body":
                size += len(message.get("body", b""))
                if size > MAX_ANSWER_BYTES:
                    raise ValueError("traces travel through remote_store, not over the bus")
                parts.append(message.get("body", b""))

        await self._app(scope, receive, send)
        return b"".join(parts)


class BusAgent:
    """The agent's part on the bus. ``run`` is a round of a loop, which lasts until ``close``."""

    def __init__(
        self,
        config: BusConfig,
        node: str,
        version: str,
        stream: RecordStream,
        app: ASGIApp,
        metrics: AgentMetrics,
    ) -> None:
        who = Publisher(node, config.owner)
        self._subject = who.requests
        self._bus = Bus(config, f"agent.{who.token}.{said.token(node)}")
        self._publisher = RecordPublisher(stream, self._bus, who, version, metrics)
        self._answers = BusAnswers(app)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None

    def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # by ``close``
            asyncio.run(self._serve())

    def close(self) -> None:
        """End ``run``; from any thread."""
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                loop.call_soon_threadsafe(task.cancel)

    async def _serve(self) -> None:
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        try:
            await self._bus.connect()
            await self._bus.answer(self._subject, self._answers.answer)
            while True:
                with contextlib.suppress(BusError):
                    await self._publisher.advance()
                await asyncio.sleep(PUBLISH_INTERVAL_S)
        finally:
            await self._bus.close()
