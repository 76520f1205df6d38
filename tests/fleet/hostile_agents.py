"""Agents that mean no good, in one process: ``hostile_agents.py PORT…``, a port for each of KINDS.

``tenant`` speaks of the job of others; ``garbage`` sends what is no line; ``flood`` steps of
a thousand ranks as fast as they are taken, and never its time; ``hour`` has a clock one ahead.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping

KINDS = ("tenant", "garbage", "flood", "hour")
_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n\r\n"
_LEASED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
FLOOD_RANKS, FLOOD_LINES = 1024, 50_000
INTERVAL_S = 0.2


def lines(*said: Mapping[str, object]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in said)


def rank(owner: str, number: int, world_size: int, job: str) -> dict[str, object]:
    about = {"type": "rank", "time": time.time(), "owner": owner, "run": "first"}
    return {**about, "job": job, "rank": number, "world_size": world_size}


def step(owner: str, number: int, count: int, job: str, now: float) -> dict[str, object]:
    about = {"type": "step", "time": now, "owner": owner, "run": "first", "step": count}
    return {**about, "job": job, "rank": number, "duration_s": INTERVAL_S}


def end(kind: str, now: float) -> bytes:
    cursor = {"type": "cursor", "cursor": "00000000-1", "node": kind, "version": "0"}
    return lines({"type": "clock", "time": now}, cursor)


def tenant() -> Iterator[bytes]:
    for count in itertools.count(1):
        said = [rank("uid/0", 0, 4, "train"), step("uid/0", 0, count, "train", time.time())]
        yield lines(*said) + end("tenant", time.time())


def garbage() -> Iterator[bytes]:
    noise = random.Random(0)
    while True:
        yield noise.randbytes(20_000) + b"\n" + b"[" * 5000 + b"\n" + end("garbage", time.time())


def flood() -> Iterator[bytes]:
    yield lines(*(rank("uid/9", number, FLOOD_RANKS, "flood") for number in range(FLOOD_RANKS)))
    said = (step("uid/9", n % FLOOD_RANKS, n, "flood", time.time()) for n in range(FLOOD_LINES))
    block = lines(*said)
    while True:
        yield block


def hour() -> Iterator[bytes]:
    yield lines(rank("uid/8", 0, 1, "clocked"))
    for count in itertools.count(1):
        now = time.time() + 3600.0
        yield lines(step("uid/8", 0, count, "clocked", now)) + end("hour", now)


SAY = {"tenant": tenant, "garbage": garbage, "flood": flood, "hour": hour}


async def serve(kind: str, port: int) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if request.startswith(b"POST"):
            writer.write(_LEASED)
            return writer.close()
        writer.write(_HEAD)
        for said in SAY[kind]():
            writer.write(said)
            try:
                await writer.drain()
            except ConnectionError:
                return None
            if kind != "flood":
                await asyncio.sleep(INTERVAL_S)

    await asyncio.start_server(answer, "127.0.0.1", port)


async def main() -> None:
    for kind, port in zip(KINDS, sys.argv[1:], strict=True):
        await serve(kind, int(port))
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
