"""One partition of the jobs: messages of agents in, committed changes of anomalies out.

All times are those of the stream, so that a replay of its messages finds the same. A change
is first committed with the state of its job; only then may anything follow from it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from warpwatch_detection.anomalies.register import Change
from warpwatch_fleet.agent_link import AgentError
from warpwatch_fleet.bus.states import Committed, Effect, Head, PartitionStates, Place
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.node import Node
from warpwatch_fleet.targets import MAX_TARGETS, Target
from warpwatch_runtime.bus import StreamMessage
from warpwatch_telemetry.bus_messages import (
    BatchId,
    Publisher,
    read_batch_id,
    read_subject,
    unpack,
)
from warpwatch_telemetry.jobs import JobId

JUDGE_INTERVAL_S = 0.5
# An effect is repeated by the next worker if this one dies so soon after its commit.
PENDING_S = 60.0
# One that gives the partition up has done what is older.
GIVEN_S = 5.0
# Agents repeat what lives three times within this: replaying begins so much before the states.
LIVE_S = 60.0
# After this time without a record a job is forgotten with its state.
JOB_KEPT_S = 1200.0
# A node that says nothing is down, and later forgotten.
SILENT_S = 15.0
NODE_KEPT_S = 3600.0


class Partition:
    """The partition ``number``; everything is for one loop. load: lines a second, lately."""

    def __init__(
        self,
        number: int,
        cluster: Cluster,
        states: PartitionStates,
        committed: Committed,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.number = number
        self.cluster = cluster
        self.lines = 0
        self.load = 0.0
        self._states = states
        self._head = committed.head
        self._revision = committed.revision
        self._places = {place.id: place for place in committed.head.jobs}
        self._monotonic = monotonic
        # The time that the stream has reached, and the time of the next evaluation.
        self.time = 0.0
        self._judge_at = 0.0
        self._begun_at = wall()
        self._batches: dict[str, BatchId] = {}
        self._heard: dict[str, float] = {}
        self._busy = asyncio.Lock()
        self._uncommitted: list[Change] = []
        self._updated: list[Change] = []

    @property
    def begin(self) -> float | None:
        """The time of the stream from which on to read; None for all that there is."""
        return min((place.time - LIVE_S for place in self._head.jobs), default=None)

    # --- messages ---

    def feed(self, message: StreamMessage) -> None:
        """Apply a message. Invalid ones are counted."""
        with self.cluster.lock:
            try:
                of_node, number, who = read_subject(message.subject)
                batch = read_batch_id(message.ident)
                if number != self.number:
                    raise ValueError("another partition")
            except ValueError:
                self.cluster.refused["bad_subject"] += 1
                return
            self.time = max(self.time, message.at)
            self.cluster.is_catching_up = message.at < self._begun_at
            node = self._node(who, of_node)
            if node is not None and self._is_new(node.target.address, batch):
                self._feed(node, message.content, message.at)
            if self.time >= self._judge_at:
                self._judge_at = self.time + JUDGE_INTERVAL_S
                self._judge()

    def _node(self, who: Publisher, of_node: bool) -> Node | None:
        target = target_of(who, None if of_node else self.number)
        node = self.cluster.nodes.get(target.address)
        if node is None and len(self.cluster.nodes) >= MAX_TARGETS:
            self.cluster.refused["too_many_agents"] += 1
            return None
        try:
            return node or self.cluster.add_node(target)
        except AgentError:
            self.cluster.refused["bad_subject"] += 1
            return None

    def _is_new(self, address: str, batch: BatchId) -> bool:
        known = self._batches.get(address)
        if known is not None and known.boot == batch.boot and batch.number <= known.number:
            return False
        self._batches[address] = batch
        return True

    def _feed(self, node: Node, content: bytes, at: float) -> None:
        try:
            lines = unpack(content)
            # Lines that are read again are not a lasting load.
            self.lines += 0 if self.cluster.is_catching_up else len(lines)
            self.cluster.feed(node.target.address, lines, at)
        except ValueError:
            node.refused["unreadable"] += 1
        except AgentError:
            node.refused["other_node"] += 1
        node.up, node.reason = True, ""
        self._heard[node.target.address] = self._monotonic()

    def _judge(self) -> None:
        for change in self.cluster.judge(self.time):
            if change.what == "updated":
                self._updated.append(change)
            else:
                self._uncommitted.append(change)
                self.cluster.uncommitted[change.anomaly.id] = change.what

    # --- commits ---

    async def advance(self, *, everything: bool = False) -> list[Change]:
        """Commit what has changed, and return it. everything: the state of each job as well.

        Raises ConflictError if another has the partition, BusError.
        """
        async with self._busy:
            return await self._advance(everything)

    async def _advance(self, everything: bool) -> list[Change]:
        with self.cluster.lock:
            self._forget_silent()
            changes = list(self._uncommitted)
            changed = {change.anomaly.job_id for change in changes}
            changed |= self.cluster.jobs.keys() if everything else set()
            saved = self.cluster.to_save(self.time, changed)
            updated, self._updated = self._updated, []
            times = {one.id: self.cluster.jobs[one.id].judged_until for one in saved}
            forgotten, self.cluster.forgotten = self.cluster.forgotten, []
        for job in saved:
            place = await self._states.save(
                self.number, job, times[job.id], self._places.get(job.id)
            )
            self._places[job.id] = place
        oldest = self.time - (GIVEN_S if everything else PENDING_S)
        pending = tuple(effect for effect in self._head.pending if effect.time >= oldest)
        if saved or changes or forgotten or len(pending) != len(self._head.pending):
            await self._commit(pending, changes, forgotten)
        return [*changes, *updated]

    async def _commit(
        self, pending: tuple[Effect, ...], changes: list[Change], forgotten: list[JobId]
    ) -> None:
        for job in forgotten:
            self._places.pop(job, None)
        pending += tuple(Effect(self.time, change) for change in changes)
        head = Head(self._head.writer, tuple(self._kept()), pending)
        self._revision = await self._states.commit(self.number, head, self._revision)
        self._head = head
        with self.cluster.lock:
            del self._uncommitted[: len(changes)]
            self.cluster.uncommitted = {
                change.anomaly.id: change.what for change in self._uncommitted
            }

    def _kept(self) -> list[Place]:
        """Return the places but those of jobs that are not heard of any more."""
        oldest = self.time - JOB_KEPT_S
        with self.cluster.lock:
            live = self.cluster.jobs.keys()
            self._places = {
                job: place
                for job, place in self._places.items()
                if job in live or place.time >= oldest
            }
        return list(self._places.values())

    def _forget_silent(self) -> None:
        now = self._monotonic()
        for address, heard in list(self._heard.items()):
            node = self.cluster.nodes[address]
            if now - heard > NODE_KEPT_S:
                del self._heard[address], self._batches[address]
                self.cluster.remove_node(address)
            elif now - heard > SILENT_S:
                node.up, node.reason = False, f"no record of it for {SILENT_S:.0f} s"


def target_of(who: Publisher, partition: int | None) -> Target:
    """Return the agent as the rest of the fleet knows it; partition: of the jobs in these lines."""
    name = who.node if who.owner is None else f"{who.owner}:{who.node}"
    address = name if partition is None else f"{partition}/{name}"
    labels = {} if who.owner is None else {"owner": who.owner}
    return Target(address, labels, node=who.node, partition=partition)
