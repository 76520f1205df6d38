"""Where a fleet's records come from: agents that are followed over HTTP, or the bus."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection

from warpwatch_detection.anomalies.register import Change
from warpwatch_fleet.agent_link import SILENCE_S, AgentError, HttpLinks, Links
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.config import FleetFile
from warpwatch_fleet.memory import JobStateStore
from warpwatch_fleet.node import Node
from warpwatch_fleet.targets import Targets
from warpwatch_telemetry.errors import Refused, in_a_line

logger = logging.getLogger(__name__)

TARGETS_INTERVAL_S = 5.0
RETRY_S = (1.0, 30.0)

Round = tuple[float, Callable[[], Awaitable[None]]]


class FleetSource(ABC):
    """The records of all agents, and the changes of anomalies that are found in them.

    rounds: the work of the loop that follows agents, with its intervals.
    """

    partitions = 1
    view: Cluster
    links: Links
    rounds: Collection[Round]

    @property
    @abstractmethod
    def missing(self) -> tuple[str, ...]:
        """Why records are not there, one line per reason."""

    @abstractmethod
    def evaluated(self) -> dict[str, float]:
        """Return by its number whether a partition of the jobs is evaluated here."""

    async def start(self) -> None:
        """Do what comes before all rounds."""
        return

    @abstractmethod
    async def evaluate(self) -> list[Change]:
        """Return the changes of the fleet's own anomalies, which are kept over a restart."""

    async def alone(self, work: Callable[[int], Awaitable[int]]) -> None:
        """Do the work unless another process of the fleet is doing it.

        work: receives the sum of its last results in the other processes.
        """
        await work(0)

    @abstractmethod
    async def close(self) -> None: ...


class AgentFollower:
    """Follows all agents. ``refresh`` is called now and then, in the loop that follows."""

    def __init__(
        self,
        targets: Targets,
        agents: HttpLinks,
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
        """Follow an agent until cancelled, later and later while it cannot be reached."""

        def receive(lines: list[bytes]) -> None:
            now = self._wall()
            with self._cluster.lock:
                self._cluster.feed(address, lines, now)
                if not node.up:
                    logger.info("%s: following %s", address, node.name)
                node.up, node.reason = True, ""

        wait_s = RETRY_S[0]
        while True:
            started, reason = self._monotonic(), "the agent has ended the stream"
            try:
                node.begin()
                await self._agents.link(node.target).follow(node.cursor, receive)
            except (AgentError, Refused) as error:
                reason = str(error)
            except Exception as error:
                logger.exception("following is tried again")
                reason = f"following failed: {in_a_line(error)}"
            with self._cluster.lock:
                if node.reason != reason:
                    logger.warning("%s: %s", address, reason)
                node.up, node.reason = False, reason
            if self._monotonic() - started > SILENCE_S:
                wait_s = RETRY_S[0]
            # Not all agents at once when the network is back.
            await self._sleep(wait_s * random.uniform(0.5, 1.0))
            wait_s = min(2 * wait_s, RETRY_S[1])


class HttpSource(FleetSource):
    """One process follows all agents over HTTP."""

    links: HttpLinks

    def __init__(self, config: FleetFile, holder: str, unsaved: Callable[[], None]) -> None:
        own = config.fleet
        self._targets = Targets(own)
        self.links = HttpLinks(own.agents, holder)
        self._memory = JobStateStore(own.state_dir, fail=unsaved)
        self.view = Cluster(config.detection, config.anomalies, self._memory.load())
        self._follower = AgentFollower(self._targets, self.links, self.view)
        rounds = (self._follower.refresh, self.links.renew)
        self.rounds = tuple((TARGETS_INTERVAL_S, one) for one in rounds)

    @property
    def missing(self) -> tuple[str, ...]:
        """Lost agents are shown with their jobs instead."""
        return (*self._targets.failing, *filter(None, (self._memory.complaint.text,)))

    def evaluated(self) -> dict[str, float]:
        with self.view.lock:
            return {"0": any(node.up for node in self.view.nodes.values())}

    async def evaluate(self) -> list[Change]:
        now = time.time()
        with self.view.lock:
            self.view.drop_waiting()
            changes = self.view.evaluate(now)
            changed = {one.anomaly.job_id for one in changes if one.what != "updated"}
            saved = self.view.to_save(now, changed)
            forgotten, self.view.forgotten = self.view.forgotten, []
        if saved or forgotten:
            # Saved first: a fleet that is killed now reports it only once.
            await asyncio.to_thread(self._memory.keep, saved, forgotten)
        return changes

    async def close(self) -> None:
        tasks = list(self._follower.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.links.close()
