"""The agent on the bus: publishes its records, and replies to the fleet's requests.

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
from functools import partial
from typing import Any

from starlette.types import ASGIApp, Message

from warpwatch_daemon.for_fleet.record_stream import MAX_BATCH_BYTES, Portion, RecordStream
from warpwatch_runtime.agent_metrics import AgentMetrics
from warpwatch_runtime.bus import Bus, BusConfig, BusError
from warpwatch_serving.connection import Peer
from warpwatch_telemetry import bus_messages
from warpwatch_telemetry.bus_messages import PARTITIONS, BatchId, Publisher
from warpwatch_telemetry.log import encode_line
from warpwatch_telemetry.records import Clock
from warpwatch_telemetry.stream import CursorLine, encode_stream_line

PUBLISH_INTERVAL_S = 1.0
# In a round without new lines, a clock is published if the last one is older than this: with long
# steps, clocks are most of what an agent publishes.
CLOCK_INTERVAL_S = 3.5
# The last lines are published within this time.
LAST_LINES_S = 2.0
# A reader that begins in the middle of the stream knows all live ranks after this time.
LIVE_INTERVAL_S = 20.0
_PATH = re.compile(r"leases|captures|captures/prepare|captures/[\w-]{1,64}/(cancel|[\w.#-]{1,200})")
_ANOMALY = b'{"type":"anomaly"'
_CLOCK = re.compile(rb'\{"type":"clock"[^\n]*\n')
_GAP = re.compile(rb'\{"type":"gap"(?:,"lost":(\d+))?\}')
# Half a minute of the lines of an agent with many short steps.
MAX_ANSWER_BYTES = 64 * 2**20


class RecordPublisher:
    """Publishes the stream's lines: those of a job to its partition, those of the node to nodes.

    Faults of devices go to the partitions of the jobs that run here, too, and a gap to those of
    the jobs that have run here. Lines that were not published are sent again; while the bus is
    away, the stream's buffer fills and drops the oldest.
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
        # While the bus is away, nothing is read.
        stream.keep()
        self.bus = bus
        self._who = who
        self._version = version
        self._monotonic = monotonic
        self._wall = wall
        self._cursor: str | None = None
        self._boot = os.urandom(8).hex()
        self._count = 0
        self._live_at = self._clock_at = float("-inf")
        # The partitions that have records of this node.
        self._published: set[int] = set()
        # Subject, lines and id of messages that are not published yet.
        self._unsent: deque[tuple[str, bytes, str]] = deque()
        count = metrics.counter("bus_messages_total")
        self._sent, self._failed = count.labels("sent"), count.labels("failed")
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
                    await self.bus.publish(subject, bus_messages.pack(lines), ident)
                except BusError:
                    self._failed.inc()
                    # A clock that comes late would shift all times.
                    left = ((to, _CLOCK.sub(b"", lines), own) for to, lines, own in self._unsent)
                    self._unsent = deque(left)
                    raise
                self._sent.inc()
                self._unsent.popleft()

    def _messages(self, portion: Portion) -> Iterator[tuple[str, bytes, str]]:
        # By the clock, the fleet knows until when it has everything.
        end = b"" if portion.more else encode_line(Clock(self._wall())) or b""
        end += encode_stream_line(CursorLine(portion.cursor, self._who.node, self._version))
        for subject, lines in self._by_subject(portion).items():
            for content in bus_messages.portions([*lines, end], MAX_BATCH_BYTES):
                self._count += 1
                yield subject, content, str(BatchId(self._boot, self._count))

    def _by_subject(self, portion: Portion) -> dict[str, list[bytes]]:
        """Return the lines of each subject that has any, or whose clock is due."""
        own = sorted({key % PARTITIONS for key in self._stream.live_keys()})
        by_partition: dict[int, list[bytes]] = {partition: [] for partition in own}
        of_node: list[bytes] = []
        lines, now = portion.lines, self._monotonic()
        if now - self._live_at >= LIVE_INTERVAL_S and not portion.more:
            self._live_at = now
            lines = [*lines, *self._live(own)]
        for key, line in lines:
            if key is not None:
                by_partition.setdefault(key % PARTITIONS, []).append(line)
                continue
            of_node.append(line)
            if gap := _GAP.match(line):
                self._lost.inc(int(gap[1] or 0))
                # The end of a job may be among the lost lines.
                for partition in self._published:
                    by_partition.setdefault(partition, []).append(line)
            if line.startswith(_ANOMALY):
                for partition in own:
                    by_partition[partition].append(line)
        is_due = now - self._clock_at >= CLOCK_INTERVAL_S
        if is_due:
            self._clock_at = now
        found = {
            bus_messages.records_subject(partition, self._who): own_lines
            for partition, own_lines in by_partition.items()
            if own_lines or is_due
        }
        self._published |= by_partition.keys()
        if of_node or is_due:
            found[bus_messages.node_subject(self._who)] = of_node
        return found

    def _live(self, own: Iterable[int]) -> list[tuple[int | None, bytes]]:
        """Return the lines of what lives, those of devices for each partition of a job here."""
        live = self._stream.live()
        devices = [line for key, line in live if key is None and not line.startswith(_ANOMALY)]
        return [*live, *((partition, line) for partition in own for line in devices)]


class BusReplies:
    """Answers requests as the HTTP API does for a holder of the token: it is the same code."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def reply(self, operation: str, content: bytes) -> bytes:
        """Return the reply: its status in three digits, then its body."""
        method, _, path = operation.partition(".")
        path = bus_messages.name_of(path)
        if method not in ("get", "post") or not _PATH.fullmatch(path):
            return b"404" + b'{"error":{"reason":"not_found","detail":"no such request"}}'
        return await self._respond(method.upper(), f"/api/v1/{path}", content)

    async def _respond(self, method: str, path: str, content: bytes) -> bytes:
        # The permissions on the bus decide which clients may send requests.
        peer = Peer("bus", os.getuid(), privileged=True, on_socket=True)
        headers = {b"content-type": b"application/json", b"host": b"bus"}
        headers[b"content-length"] = str(len(content)).encode()
        scope: dict[str, Any] = {
            "type": "http", "http_version": "1.1", "scheme": "http", "method": method,
            "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "",
            "headers": list(headers.items()), "client": None, "state": {"peer": peer},
        }  # fmt: skip
        bodies = iter([content])
        parts = [b"500"]

        async def receive() -> Message:
            for body in bodies:
                return {"type": "http.request", "body": body, "more_body": False}
            # Nobody disconnects here.
            await asyncio.get_running_loop().create_future()
            raise AssertionError

        async def send(message: Message) -> None:
            if message["type"] == "http.response.start":
                parts[0] = str(message["status"]).encode()
                return
            parts.append(message.get("body", b""))
            if sum(map(len, parts)) > MAX_ANSWER_BYTES:
                raise ValueError("traces travel through remote_store, not over the bus")

        await self._app(scope, receive, send)
        return b"".join(parts)


class BusAgent:
    """The agent's part on the bus.

    ``run`` is a round of a loop, which lasts until ``close`` or until the server ends it.
    """

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
        self._bus = Bus(config, f"agent.{who.token}.{bus_messages.token(node)}")
        self._publisher = RecordPublisher(stream, self._bus, who, version, metrics)
        self._replies = BusReplies(app)
        self._is_closed = False
        self._cancel: Callable[[], object] = lambda: None

    def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):  # by ``close``
            asyncio.run(self._serve())

    def close(self) -> None:
        """End ``run`` once the last lines are published; from any thread."""
        self._is_closed = True
        with contextlib.suppress(RuntimeError):  # it has ended by itself
            self._cancel()

    async def _serve(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._cancel = partial(asyncio.get_running_loop().call_soon_threadsafe, task.cancel)
        if self._is_closed:
            return
        try:
            await self._bus.connect()
            await self._bus.serve(self._subject, self._replies.reply)
            # Only a cancel by ``close`` ends this: a late one would hit the last lines.
            while not self._bus.is_closed:
                with contextlib.suppress(BusError):
                    await self._publisher.advance()
                await asyncio.sleep(PUBLISH_INTERVAL_S)
        finally:
            if self._bus.is_connected:
                with contextlib.suppress(BusError, TimeoutError):
                    await asyncio.wait_for(self._publisher.advance(), LAST_LINES_S)
            await self._bus.close()
