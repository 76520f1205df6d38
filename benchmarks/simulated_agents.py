"""Simulates many agents in one process, each on a loopback address of its own.

``simulated_agents.py PORT SETTINGS`` serves `/api/v1/records` as agents do, with a step per second
and rank and with the faults in SETTINGS (JSON). It prints one line once it listens.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

RANKS_A_NODE = 8
STEP_S, COMM_S, NOISE_S = 1.0, 0.1, 0.004
SLOW_S = 0.3
# The sizes of jobs, in turn: 8 to 256 ranks.
NODES_A_JOB = (1, 2, 4, 8, 16, 32)
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n\r\n"
_LEASED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


class Node(NamedTuple):
    number: int
    job: str
    first_rank: int
    world_size: int


def layout(nodes: int, largest: int) -> list[Node]:
    """Put one job on ``largest`` nodes and smaller ones on the rest."""
    found: list[Node] = []
    for number, count in enumerate(_sizes(nodes, largest)):
        ranks = count * RANKS_A_NODE
        for member in range(count):
            found.append(Node(len(found), f"job-{number}", member * RANKS_A_NODE, ranks))
    return found


def _sizes(nodes: int, largest: int) -> Iterator[int]:
    yield largest
    left, turn = nodes - largest, 0
    while left:
        count = min(NODES_A_JOB[turn % len(NODES_A_JOB)], left)
        yield count
        left, turn = left - count, turn + 1


def address(number: int) -> str:
    return f"127.1.{number // 250}.{number % 250 + 1}"


class Agents:
    """The agents of ``nodes``, with the faults in ``settings``."""

    def __init__(self, nodes: list[Node], settings: dict[str, Any]) -> None:
        self._nodes = {address(node.number): node for node in nodes}
        self._slow: dict[str, int] = settings["slow"]
        self._stuck: list[str] = settings["stuck"]
        self._faults_at: float = settings["at"]
        self._begun = time.time()
        # Drawn once: random numbers would cost more than the lines.
        self._noise = [random.Random(0).gauss(0.0, NOISE_S) for _ in range(9973)]

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return writer.close()
        if request.startswith(b"POST"):
            writer.write(_LEASED)
            return writer.close()
        node = self._nodes[writer.get_extra_info("sockname")[0]]
        writer.write(_HEAD + b"".join(self._ranks(node)))
        # The agents' rounds are spread, but all ranks of a job report the same steps.
        begun = self._begun + node.number % 100 / 100
        number = int(time.time() - begun) + 1
        while not writer.is_closing():
            await asyncio.sleep(begun + number * STEP_S - time.time())
            now = time.time()
            if not (node.job in self._stuck and now >= self._faults_at):
                writer.write(b"".join(self._steps(node, number, now)))
            writer.write(_end(node, number, now))
            try:
                await writer.drain()
            except ConnectionError:
                return None
            number += 1

    def _ranks(self, node: Node) -> Iterator[bytes]:
        for rank in _ranks_of(node):
            yield (
                b'{"type":"rank","time":%.3f,"job":"%s","rank":%d,"world_size":%d,'
                b'"owner":"ns/bench","run":"1"}\n'
                % (time.time(), node.job.encode(), rank, node.world_size)
            )

    def _steps(self, node: Node, number: int, now: float) -> Iterator[bytes]:
        culprit = self._slow.get(node.job) if now >= self._faults_at else None
        job = node.job.encode()
        for rank in _ranks_of(node):
            noise_s = self._noise[(number * 131 + rank * 17) % len(self._noise)]
            late_s = 0.0 if culprit is None else SLOW_S
            comm_s = COMM_S + (late_s if rank != culprit else 0.0)
            yield (
                b'{"type":"step","time":%.3f,"job":"%s","rank":%d,"step":%d,"duration_s":%.5f,'
                b'"phases_s":{"comm":%.5f},"owner":"ns/bench","run":"1"}\n'
                % (now, job, rank, number, STEP_S + late_s + noise_s, comm_s)
            )


def _ranks_of(node: Node) -> range:
    return range(node.first_rank, node.first_rank + RANKS_A_NODE)


def _end(node: Node, number: int, now: float) -> bytes:
    return (
        b'{"type":"clock","time":%.3f}\n'
        b'{"type":"cursor","cursor":"00000000-%d","node":"node-%d","version":"bench"}\n'
        % (now, number, node.number)
    )


async def main(port: int, settings: dict[str, Any]) -> None:
    agents = Agents(layout(settings["nodes"], settings["largest"]), settings)
    server = await asyncio.start_server(agents.serve, "0.0.0.0", port, backlog=4096)
    print("listening", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), json.loads(sys.argv[2])))
