"""Where a fleet's records come from: agents that are followed over HTTP, or the bus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol

from warpwatch_detection.anomalies.register import Change
from warpwatch_fleet.agent_link import Agents, Links
from warpwatch_fleet.cluster import Cluster, View
from warpwatch_fleet.config import FleetFile
from warpwatch_fleet.following import AgentFollower
from warpwatch_fleet.memory import JobStateStore
from warpwatch_fleet.targets import Targets

TARGETS_INTERVAL_S = 5.0

Round = tuple[float, Callable[[], Awaitable[None]]]


class Source(Protocol):
    """The records of all agents, and the changes of anomalies that are found in them."""

    partitions: int

    @property
    def view(self) -> View: ...

    @property
    def links(self) -> Links: ...

    @property
    def rounds(self) -> Collection[Round]:
        """The work of the loop that follows agents, with its intervals."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Why records are not there, one line per reason."""

    def judged(self) -> dict[str, float]:
        """Return by its number whether a partition of the jobs is evaluated here."""

    async def start(self) -> None: ...

    async def judge(self) -> list[Change]:
        """Return the changes of the fleet's own anomalies, which are kept over a restart."""

    async def alone(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work unless another process of the fleet is doing it."""

    async def close(self) -> None: ...


class HttpSource:
    """Implements ``Source``: one process follows all agents over HTTP."""

    partitions = 1

    def __init__(self, config: FleetFile, holder: str, unsaved: Callable[[], None]) -> None:
        own = config.fleet
        self._targets = Targets(own)
        self.links = Agents(own.agents, holder)
        self._memory = JobStateStore(own.state_dir, fail=unsaved)
        self.view = Cluster(config.detection, config.anomalies, self._memory.load())
        self._follower = AgentFollower(self._targets, self.links, self.view)
        self.rounds = ((TARGETS_INTERVAL_S, self._follower.refresh),)

    @property
    def missing(self) -> tuple[str, ...]:
        """Lost agents are shown with their jobs instead."""
        return (*self._targets.failing, *filter(None, (self._memory.complaint.text,)))

    def judged(self) -> dict[str, float]:
        with self.view.lock:
            return {"0": any(node.up for node in self.view.nodes.values())}

    async def start(self) -> None:
        """Do nothing: targets are read in a round."""

    async def judge(self) -> list[Change]:
        now = time.time()
        with self.view.lock:
            changes = self.view.judge(now)
            changed = {one.anomaly.job_id for one in changes if one.what != "updated"}
            saved = self.view.to_save(now, changed)
            forgotten, self.view.forgotten = self.view.forgotten, []
        if saved or forgotten:
            # Saved first: a fleet that is killed now reports it only once.
            await asyncio.to_thread(self._memory.keep, saved, forgotten)
        return changes

    async def alone(self, work: Callable[[], Awaitable[None]]) -> None:
        await work()

    async def close(self) -> None:
        tasks = list(self._follower.tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.links.close()
