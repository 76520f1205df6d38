"""Follows the agents: one for each target, as targets come and go, again after a failure."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from warpwatch_fleet.agent_link import SILENCE_S, AgentError, Agents, in_a_line
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.node import Node
from warpwatch_fleet.targets import Targets

logger = logging.getLogger(__name__)

RETRY_S = (1.0, 30.0)


class AgentFollower:
    """Follows all agents. ``refresh`` is called now and then, in the loop that follows."""

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
        """One task for each agent."""
        return self._follows.values()

    async def refresh(self) -> None:
        """Read the targets; follow those that are new, and no longer those that were removed."""
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
                self._cluster.feed(address, lines, now)
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
            await self._agents.link(node.target).follow(node.cursor, take)

        def ended() -> None:
            failed("the agent has ended the stream")

        await again_and_again(follow, failed, ended, self._monotonic, self._sleep)


async def again_and_again(
    follow: Callable[[], Any],
    failed: Callable[[str], None],
    ended: Callable[[], None],
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> None:
    """Follow an agent until cancelled, later and later while it cannot be reached."""
    wait_s = RETRY_S[0]
    while True:
        begun = monotonic()
        try:
            await follow()
            ended()
        except AgentError as error:
            failed(str(error))
        except Exception as error:
            logger.exception("following is tried again")
            failed(f"following failed: {in_a_line(error)}")
        if monotonic() - begun > SILENCE_S:
            wait_s = RETRY_S[0]
        # Not all agents at once when the network is back.
        await sleep(wait_s * random.uniform(0.5, 1.0))
        wait_s = min(2 * wait_s, RETRY_S[1])
