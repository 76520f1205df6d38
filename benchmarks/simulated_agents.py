"""Simulates many agents in one process, over HTTP or on a bus.

``simulated_agents.py PORT SETTINGS`` reports a step per rank and interval, with the faults in
SETTINGS (JSON): each agent serves `/api/v1/records` on a loopback address of its own, or all
publish batches to the nats-server at PORT. It prints one line once it listens or is connected.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from warpwatch_telemetry.bus_messages import (
    Publisher,
    node_subject,
    pack,
    partition_of,
    records_subject,
)
from warpwatch_telemetry.jobs import JobId

# The shares of a step.
COMM, NOISE, SLOW = 0.1, 0.004, 0.3
# Agents on a bus repeat their ranks, and without new lines their clock, after these seconds.
LIVE_S, CLOCK_S = 20, 4
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n\r\n"
_LEASED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
_CONNECT = b'CONNECT {"verbose":false,"headers":true}\r\nSUB warpwatch.node.> 1\r\n'


class Scale(NamedTuple):
    """The number of nodes, those of the largest job, and those of the other jobs in turn.

    ranks: per node. step_s: the interval of steps in whole seconds.
    """

    nodes: int
    largest: int
    sizes: Sequence[int] = (1, 2, 4, 8, 16, 32)
    ranks: int = 8
    step_s: int = 1


class SimAgent(NamedTuple):
    number: int
    job: str
    job_number: int
    ranks: range
    world_size: int


def layout(scale: Scale) -> list[SimAgent]:
    found: list[SimAgent] = []
    for number, count in enumerate(_sizes(scale)):
        for member in range(count):
            ranks = range(member * scale.ranks, (member + 1) * scale.ranks)
            found.append(SimAgent(len(found), f"job-{number}", number, ranks, count * scale.ranks))
    return found


def _sizes(scale: Scale) -> Iterator[int]:
    yield scale.largest
    left, turn = scale.nodes - scale.largest, 0
    while left:
        count = min(scale.sizes[turn % len(scale.sizes)], left)
        yield count
        left, turn = left - count, turn + 1


def address(number: int) -> str:
    return f"127.1.{number // 250}.{number % 250 + 1}"


class Agents:
    """The agents of ``scale``, with the faults in ``settings``."""

    def __init__(self, scale: Scale, settings: dict[str, Any]) -> None:
        self._nodes = {address(node.number): node for node in layout(scale)}
        self._step_s = scale.step_s
        self._slow: dict[str, int] = settings["slow"]
        self._stuck: list[str] = settings["stuck"]
        self._faults_at: float = settings["at"]
        self._begun = time.time()
        # Drawn once: random numbers would cost more than the lines.
        self._noise = [random.Random(0).gauss(0.0, NOISE) for _ in range(9973)]

    # --- over HTTP ---

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return writer.close()
        if request.startswith(b"POST"):
            writer.write(_LEASED)
            return writer.close()
        node = self._nodes[writer.get_extra_info("sockname")[0]]
        writer.write(_HEAD + self._ranks(node))
        # The agents' rounds are spread, but all ranks of a job report the same steps.
        begun = self._begun + node.number % 100 / 100
        second = int(time.time() - begun) + 1
        while not writer.is_closing():
            await asyncio.sleep(begun + second - time.time())
            now = time.time()
            writer.write(self._steps(node, second, now) + _end(node, second, now))
            try:
                await writer.drain()
            except ConnectionError:
                return None
            second += 1

    # --- on a bus ---

    async def publish(self, port: int) -> None:
        """Publish a batch per second and agent, as agents do, in the bus's own protocol."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(_CONNECT)
        answering = asyncio.create_task(_answer(reader, writer))
        print("connected", flush=True)
        nodes, tick = list(self._nodes.values()), 0
        while not answering.done():
            await asyncio.sleep(self._begun + tick / 10 - time.time())
            for node in nodes[tick % 10 :: 10]:
                writer.write(b"".join(self._batches(node, tick // 10, time.time())))
            await writer.drain()
            tick += 1
        answering.result()

    def _batches(self, node: SimAgent, second: int, now: float) -> Iterator[bytes]:
        lines, end = self._steps(node, second, now), _end(node, second, now)
        if second == 0 or (second + node.number) % LIVE_S == 0:
            lines = self._ranks(node) + lines
        of_node, of_records = _subjects(node)
        is_due = (second + node.number) % CLOCK_S == 0
        if is_due:
            yield _message(of_node, second, end)
        if lines or is_due:
            yield _message(of_records, second, lines + end)

    def _ranks(self, node: SimAgent) -> bytes:
        line = (
            b'{"type":"rank","time":%.3f,"job":"%s","rank":%d,"world_size":%d,'
            b'"owner":"ns/bench","run":"1"}\n'
        )
        about = self._begun, node.job.encode()
        return b"".join(line % (*about, rank, node.world_size) for rank in node.ranks)

    def _steps(self, node: SimAgent, second: int, now: float) -> bytes:
        number, rest = divmod(second + node.job_number, self._step_s)
        is_faulty = now >= self._faults_at
        if rest or (is_faulty and node.job in self._stuck):
            return b""
        culprit = self._slow.get(node.job) if is_faulty else None
        late_s = 0.0 if culprit is None else SLOW * self._step_s
        lines = []
        for rank in node.ranks:
            noise = self._noise[(number * 131 + rank * 17) % len(self._noise)]
            step_s = self._step_s * (1 + noise) + late_s
            comm_s = COMM * self._step_s + (late_s if rank != culprit else 0.0)
            lines.append(
                b'{"type":"step","time":%.3f,"job":"%s","rank":%d,"step":%d,"duration_s":%.5f,'
                b'"phases_s":{"comm":%.5f},"owner":"ns/bench","run":"1"}\n'
                % (now, node.job.encode(), rank, number, step_s, comm_s)
            )
        return b"".join(lines)


@cache
def _subjects(node: SimAgent) -> tuple[bytes, bytes]:
    who, job = Publisher(f"node-{node.number}"), JobId("ns/bench", node.job, "1")
    return node_subject(who).encode(), records_subject(partition_of(job), who).encode()


def _end(node: SimAgent, second: int, now: float) -> bytes:
    return (
        b'{"type":"clock","time":%.3f}\n'
        b'{"type":"cursor","cursor":"00000000-%d","node":"node-%d","version":"bench"}\n'
        % (now, second, node.number)
    )


def _message(subject: bytes, second: int, lines: bytes) -> bytes:
    head = b"NATS/1.0\r\nNats-Msg-Id: %s-%d\r\n\r\n" % (subject, second)
    content = head + pack(lines)
    return b"HPUB %s %d %d\r\n%s\r\n" % (subject, len(head), len(content), content)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Accept all leases and captures."""
    while line := await reader.readline():
        if line.startswith(b"MSG"):
            *_, reply, size = line.split()
            await reader.readexactly(int(size) + 2)
            writer.write(b"PUB %s 5\r\n200{}\r\n" % reply)
        elif line.startswith(b"PING"):
            writer.write(b"PONG\r\n")


async def main(port: int, settings: dict[str, Any]) -> None:
    agents = Agents(Scale(*settings["scale"]), settings)
    if settings["on_bus"]:
        return await agents.publish(port)
    server = await asyncio.start_server(agents.serve, "0.0.0.0", port, backlog=4096)
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), json.loads(sys.argv[2])))
