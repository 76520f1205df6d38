"""Agents that mean no good, in one process: ``hostile_agents.py PORT…``, a port for each of KINDS.

``tenant`` speaks of the job of others; ``garbage`` sends invalid lines; ``flood`` steps of
a thousand ranks as fast as they are taken, and never its time; ``hour`` has a clock one ahead.
"""

import asyncio
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n\r\n"
_LEASED = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
FLOOD_RANKS, FLOOD_LINES = 1024, 50_000
INTERVAL_S = 0.2


def line(kind: str, now: float, **fields: object) -> bytes:
    return json.dumps({"type": kind, "time": now, **fields}).encode() + b"\n"


def rank(owner: str, number: int, world_size: int, job: str, step: int = 0) -> bytes:
    about = {"owner": owner, "run": "first", "job": job, "rank": number}
    if step:
        return line("step", time.time(), **about, step=step, duration_s=INTERVAL_S)
    return line("rank", time.time(), **about, world_size=world_size)


def end(kind: str, now: float) -> bytes:
    return line("clock", now) + line("cursor", now, cursor="00000000-1", node=kind, version="0")


def tenant() -> Iterator[bytes]:
    for count in itertools.count(1):
        about = ("uid/0", 0, 4, "train")
        yield rank(*about) + rank(*about, step=count) + end("tenant", time.time())


def garbage() -> Iterator[bytes]:
    noise = random.Random(0)
    while True:
        yield noise.randbytes(20_000) + b"\n" + b"[" * 5000 + b"\n" + end("garbage", time.time())


def flood() -> Iterator[bytes]:
    about = (FLOOD_RANKS, "flood")
    yield b"".join(rank("uid/9", number, *about) for number in range(FLOOD_RANKS))
    steps = (rank("uid/9", n % FLOOD_RANKS, *about, step=n) for n in range(1, FLOOD_LINES))
    yield from itertools.repeat(b"".join(steps))


def hour() -> Iterator[bytes]:
    yield rank("uid/8", 0, 1, "clocked")
    for count in itertools.count(1):
        now = time.time() + 3600.0
        about = {"owner": "uid/8", "run": "first", "job": "clocked", "rank": 0}
        yield line("step", now, **about, step=count, duration_s=INTERVAL_S) + end("hour", now)


SAY = {"tenant": tenant, "garbage": garbage, "flood": flood, "hour": hour}
KINDS = tuple(SAY)


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
