"""Fuzzes an agent's answers: a stream of any bytes, any JSON, files; packed or not."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from tests.fuzz.watch import Target, json_tokens
from warpwatch_fleet import agent_link
from warpwatch_fleet.agent_link import MAX_LINE_BYTES, AgentError, HttpLinks
from warpwatch_fleet.config import AgentsConfig
from warpwatch_fleet.targets import Target as FleetTarget
from warpwatch_telemetry.captures import OUTCOMES
from warpwatch_telemetry.errors import Refused

# Bits of an input's first byte: the request, whether an error is answered, and how it is packed.
ASK, ERROR, GZIP, PACKED, TWICE = 1, 2, 4, 8, 16
AGENT = FleetTarget("gpu-1:9400")


class PlayedAgents(HttpLinks):
    """The connections to an agent that answers every request with ``answer``."""

    answer: httpx.Response

    def new_client(self) -> httpx.AsyncClient:
        transport = httpx.MockTransport(lambda request: self.answer)
        return httpx.AsyncClient(transport=transport, trust_env=False)


class Answers:
    def __init__(self) -> None:
        # A pace is not what is tested.
        agent_link.MAX_LINES_PER_S = agent_link.MAX_BYTES_PER_S = 10**9
        self._loop = asyncio.new_event_loop()
        self._agents = PlayedAgents(AgentsConfig(), "fleet")

    def run(self, data: bytes) -> None:
        how, content = (data[:1] or b"\0")[0], data[1:]
        headers = {"Content-Encoding": "gzip, gzip" if how & TWICE else "gzip"}
        if how & PACKED:
            content = gzip.compress(content, 1)
        self._agents.answer = httpx.Response(
            503 if how & ERROR else 200, headers=headers if how & (GZIP | TWICE) else {},
            content=parts(content),
        )  # fmt: skip
        try:
            self._loop.run_until_complete(self._ask() if how & ASK else self._follow())
        except AgentError as error:
            assert "\n" not in str(error) and len(str(error)) < 1000, str(error)
        except Refused as refused:
            assert refused.reason in OUTCOMES and "\n" not in str(refused)

    async def _ask(self) -> None:
        said = await self._agents.link(AGENT).request("captures", {})
        json.dumps(said, allow_nan=False).encode()

    async def _follow(self) -> None:
        def take(lines: list[bytes]) -> None:
            assert all(len(line) <= 2 * MAX_LINE_BYTES for line in lines)

        await self._agents.link(AGENT).follow(None, take)


async def parts(content: bytes) -> AsyncIterator[bytes]:
    half = len(content) // 2
    yield content[:half]
    yield content[half:]


def target(folder: Path) -> Target:
    refused = {"error": {"reason": "refused_busy", "detail": "another capture\nruns"}}
    said: list[object] = [refused, {"error": "x"}, {"id": "a-1", "ranks": [{"rank": 0}]}, []]
    bodies = [json.dumps(one).encode() for one in said]
    bodies.append(b'{"type":"clock","time":1}\n{"type":"cursor","cursor":"1-2","node":"gpu-1"}\n')
    hows = (0, ASK, ASK | ERROR, GZIP | PACKED, ASK | GZIP | PACKED, ASK | ERROR | TWICE, ERROR)
    seeds = [bytes([how]) + body for body in bodies for how in hows]
    seeds.append(bytes([GZIP]) + gzip.compress(bytes(2**21), mtime=0))
    return Target(Answers().run, seeds, (*json_tokens(b'"error" "reason"'), b"\n", b"\x1f\x8b\x08"))
