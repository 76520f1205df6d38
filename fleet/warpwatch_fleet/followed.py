"""The agents that are followed: one for each target, as targets come and go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.following import Agents, again_and_again
from warpwatch_fleet.node import Node
from warpwatch_fleet.targets import Targets

logger = logging.getLogger(__name__)


class Followed:
    """``look`` now and then, in the loop that follows."""

    def __init__(
        self,
        targets: Targets,
        agents: Agents,
        cluster: Cluster,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._targets = targets
        self._agents = agents
        self._cluster = cluster
        self._monotonic = monotonic
        self._wall = wall
        self._sleep = sleep
        self._follows: dict[str, asyncio.Task[None]] = {}

    @property
    def tasks(self) -> Collection[asyncio.Task[None]]:
        return self._follows.values()

    async def look(self) -> None:
        found = await asyncio.to_thread(self._targets.read)
        with self._cluster.lock:
            before = dict(self._cluster.nodes)
            self._cluster.set_targets(found)
            nodes = dict(self._cluster.nodes)
        for address, node in before.items():
            if nodes.get(address) is not node:
                self._follows.pop(address).cancel()
        for address, node in nodes.items():
            if address not in self._follows:
                self._follows[address] = asyncio.create_task(self._follow(address, node))

    async def _follow(self, address: str, node: Node) -> None:
        def take(lines: list[bytes]) -> None:
            now = self._wall()
            with self._cluster.lock:
                self._cluster.take(address, lines, now)
                if not node.up:
                    logger.info("%s: following %s", address, node.name)
                node.up, node.reason = True, ""

        def failed(reason: str) -> None:
            with self._cluster.lock:
                if node.reason != reason:
                    logger.warning("%s: %s", address, reason)
                node.up, node.reason = False, reason

        async def follow() -> None:
            node.begin()
            await self._agents.follow(node.target, lambda: node.cursor, take)

        def ended() -> None:
            failed("the agent has ended the stream")

        await again_and_again(follow, failed, ended, self._monotonic, self._sleep)
