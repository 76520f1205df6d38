"""The agents over the bus: leases, requests and small files by request and reply."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from typing import Any

from warpwatch_fleet.agent_link import AgentError, AgentLink, lease_body, read_answer
from warpwatch_fleet.targets import Target
from warpwatch_runtime.bus import Bus, BusError
from warpwatch_telemetry.bus_messages import Publisher, token
from warpwatch_telemetry.jobs import JobId

# All workers are one fleet to an agent.
HOLDER = "bus"
DOWNLOAD_TIMEOUT_S = 60.0


class BusLinks:
    """The links of one connection, for its event loop."""

    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self.loop: asyncio.AbstractEventLoop | None = None

    def link(self, target: Target) -> AgentLink:
        return BusLink(self, Publisher(target.node or target.address, target.owner))

    async def close(self) -> None:
        await self.bus.close()


class BusLink:
    """An ``AgentLink`` over the bus."""

    def __init__(self, links: BusLinks, who: Publisher) -> None:
        self._links = links
        self._subject = who.requests

    async def lease(self, job: JobId, raised: Mapping[str, str]) -> None:
        await self.request("leases", lease_body(HOLDER, job, raised))

    async def request(self, path: str, body: Mapping[str, Any]) -> Any:
        status, content = await self._ask("post", path, json.dumps(body).encode())
        return read_answer(status, content)

    async def _ask(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        try:
            subject = f"{self._subject}.{method}.{token(path)}"
            answer = await self._links.bus.ask(subject, body)
            return int(answer[:3]), answer[3:]
        except (BusError, ValueError) as error:
            raise AgentError(str(error)) from error

    def download(self, path: str) -> Iterator[bytes]:
        if self._links.loop is None:
            raise AgentError("the fleet is starting")
        asked = asyncio.run_coroutine_threadsafe(self._ask("get", path, b""), self._links.loop)
        try:
            status, content = asked.result(DOWNLOAD_TIMEOUT_S)
        except TimeoutError as error:
            asked.cancel()
            raise AgentError(f"no answer within {DOWNLOAD_TIMEOUT_S:g} s") from error
        if status != 200:
            raise AgentError(f"{status} for {path}")
        yield content
