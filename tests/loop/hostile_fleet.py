"""Agents and strangers that attack a fleet in all ways at once, until they are killed:

`hostile_fleet.py FLEET TOKEN AGENT WEBHOOK PORT…`. FLEET, AGENT and WEBHOOK are ports to attack; on
each PORT an agent of KINDS listens, on those that are left another tenant.
"""

import asyncio
import contextlib
import gzip
import itertools
import json
import random
import ssl
import sys
import time
from collections.abc import Iterator

import httpx

KINDS = ("flood", "bomb", "renamed", "misnamed")
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-ndjson\r\n"
PLAIN = HEAD + b"\r\n"
NAMES = [f"gpu-{number}" for number in range(400)]
NO_NAMES = ["a\nb", "victim?x=", "<!channel> <https://x>", "../nodes", "control-plane-1/status", ""]
NEW_JOBS, ANOMALIES = 100, 50
INTERVAL_S = 0.2
NOISE = random.Random(0)


def line(kind: str, **fields: object) -> bytes:
    return json.dumps({"type": kind, "time": time.time(), **fields}).encode() + b"\n"


def end(node: str) -> bytes:
    said = {"cursor": "00000000-1", "node": node, "version": "0.3.0\x1b[2J"}
    return line("clock") + line("cursor", **said)


def flood() -> Iterator[bytes]:
    """Yield lines with a valid name and every other fault."""
    for count in itertools.count(1):
        escapes = f"j\ud800\x1b]0;{count}\x07\n"
        made_up = f"{NOISE.getrandbits(64):x}"
        job = {"owner": "uid/9", "job": escapes, "run": "first", "rank": 0}
        lines = [
            line("rank", **job, world_size=1), line("step", **job, step=count, duration_s=0.2),
            line("step", **job | {"time": 1e300}, step=count, duration_s=1e300),
            b'{"type": [[]]}\n', b'{"type": "step", "time": ' + b"9" * 400 + b"}\n",
            b"[" * 5000 + b"\n", NOISE.randbytes(2000) + b"\n", line("tomorrow", deep=[{}]),
            line("device", device=escapes, metrics={"power_watts": 1.0}, reason=escapes),
        ]  # fmt: skip
        for number in range(NEW_JOBS):
            about = {"owner": "uid/9", "job": f"{made_up}-{number}", "run": made_up, "rank": 0}
            lines.append(line("rank", **about, world_size=1))
            lines.append(line("step", **about | {"run": f"{number}"}, step=1, duration_s=0.2))
        for number in range(ANOMALIES):
            about = {"id": f"a{number}", "kind": "xid", "severity": "critical", "device": "GPU-x"}
            about |= {"summary": f"{escapes} {count}", "node": "control-plane-1"}
            about |= {"time": 1e300 if number % 2 else time.time()}
            lines.append(json.dumps({"type": "anomaly", "anomaly": about}).encode() + b"\n")
        yield b"".join((*lines, *CLAIMED, end("hostile")))


# The captures of others, as this agent's own.
CLAIMED: list[bytes] = []


async def claim(fleet: str, token: str) -> None:
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{fleet}", headers=headers) as client:
        while True:
            with contextlib.suppress(httpx.HTTPError, ValueError, KeyError):
                shown = (await client.get("/api/v1/captures")).json()["captures"]
                files = ["rank0.stacks.json", "a\nb", "../../etc/passwd", "report.html"]
                told = [{"type": "capture", "capture": one | {"files": files}} for one in shown]
                CLAIMED[:] = [json.dumps(one).encode() + b"\n" for one in told]
            await asyncio.sleep(1)


def tenant(number: int) -> Iterator[bytes]:
    for count in itertools.count():
        jobs = range(count % 8 * 128, count % 8 * 128 + 128)
        lines = []
        for job in jobs:
            about = {"owner": f"uid/{number}", "job": f"job-{job}", "run": "first", "rank": 0}
            lines.append(line("rank", **about, world_size=1))
            lines.append(line("step", **about, step=count, duration_s=0.2))
        yield b"".join((*lines, end("gpu-1")))


def bombs() -> list[bytes]:
    """Gigabytes in few bytes: packed once, and twice."""
    once = gzip.compress(bytes(2**28), 9)
    twice = gzip.compress(once, 9)
    heads = (b"Content-Encoding: gzip", b"Content-Encoding: gzip, gzip")
    return [
        HEAD + head + b"\r\n\r\n" + packed
        for head, packed in zip(heads, (once, twice), strict=True)
    ]


async def serve(kind: str, port: int) -> None:
    connections = itertools.count()
    packed = bombs() if kind == "bomb" else []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            request = await reader.readuntil(b"\r\n\r\n")
            if b"/records" not in request:
                body = b'{"error": {"reason": "\\ud800", "detail": "\\u001b[2J"}}'
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
                await writer.drain()
            elif kind == "bomb":
                writer.write(packed[next(connections) % 2])
                await writer.drain()
            elif kind in ("renamed", "misnamed"):
                names = NAMES if kind == "renamed" else NO_NAMES
                writer.write(PLAIN + end(names[next(connections) % len(names)]))
                await writer.drain()
                await asyncio.sleep(1)
            else:
                writer.write(PLAIN)
                for said in flood() if kind == "flood" else tenant(int(kind)):
                    writer.write(said)
                    await writer.drain()
                    await asyncio.sleep(INTERVAL_S)
        writer.close()

    await asyncio.start_server(answer, "127.0.0.1", port)


async def never_end(port: int) -> None:
    """A request to a probe whose body comes byte by byte and has no end."""
    head = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head)
            while not reader.at_eof():
                writer.write(b"1\r\nx\r\n" * 100)
                await writer.drain()
                await asyncio.sleep(0)
            writer.close()
        await asyncio.sleep(0.1)


async def shake_hands(port: int) -> None:
    """TLS connections to the webhook, one after the other."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    while True:
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
            writer.write(b"POST /inject HTTP/1.1\r\n")
            await asyncio.sleep(0.5)
            writer.close()
        await asyncio.sleep(0.1)


async def main() -> None:
    fleet, token, agent, webhook, *ports = sys.argv[1:]
    tenants = map(str, range(7, 7 + len(ports) - len(KINDS)))
    for kind, port in zip((*KINDS, *tenants), ports, strict=True):
        await serve(kind, int(port))
    attacks = [never_end(int(port)) for port in (fleet, agent) for _ in range(2)]
    attacks += [shake_hands(int(webhook)) for _ in range(16)]
    print("listening", flush=True)
    await asyncio.gather(claim(fleet, token), *attacks)


if __name__ == "__main__":
    asyncio.run(main())
