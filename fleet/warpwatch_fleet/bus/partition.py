"""One partition of the jobs: messages of agents in, committed changes of anomalies out.

All times are those of the stream, so that a replay of its messages finds the same. A change
is first committed with the state of its job; only then may anything follow from it.

States of jobs lie in a bucket in chunks, which one head names. Only the head is replaced by
revision: a worker that has lost the partition cannot commit, and the states that it writes have
keys of their own. The bucket forgets by age the chunks that no head names.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import msgspec

from warpwatch_detection.anomalies.register import Change
from warpwatch_fleet.agent_link import AgentError
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.jobs import ident_of
from warpwatch_fleet.memory import SavedJob
from warpwatch_fleet.node import Node
from warpwatch_fleet.targets import MAX_TARGETS, Target
from warpwatch_runtime.bus import Bucket, StreamMessage, StreamReader
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.bus_messages import (
    MAX_MESSAGE_BYTES,
    BatchId,
    Publisher,
    pack,
    partition_of,
    read_batch_id,
    read_subject,
    unpack,
    unpack_bytes,
)
from warpwatch_telemetry.jobs import JobId

logger = logging.getLogger(__name__)

# As often as agents publish.
EVALUATE_INTERVAL_S = 1.0
# The next worker repeats a change if this one dies so soon after its commit.
PENDING_S = 60.0
# A worker that hands the partition over has acted on older changes.
HANDED_OVER_S = 5.0
# Agents repeat live ranks three times within this: a replay starts so much before the states.
LIVE_S = 60.0
# After this time without a record a job is forgotten with its state.
JOB_KEPT_S = 1200.0
# The share of the earlier load in the new one each second, which is the mean of about a minute:
# long steps come in bursts, and no partition should move for one.
FORGETTING = 0.98
# A silent node is down, and later forgotten.
SILENT_S = 15.0
# Records have a reader of their own, which may be so far behind that of the nodes.
BEHIND_S = 15.0
NODE_KEPT_S = 3600.0
# A job of 100,000 ranks, packed and unpacked.
MAX_CHUNKS = 512
MAX_STATE_BYTES = 256 * 2**20


class StoredJob(msgspec.Struct, frozen=True):
    """The place of a job's state in the bucket: the chunks below ``key``. time: of the state."""

    id: JobId
    key: str
    chunks: int
    time: float


class Effect(msgspec.Struct, frozen=True):
    """A change that was committed at ``time`` of the stream, for users and exporters."""

    time: float
    change: Change


class Head(msgspec.Struct, frozen=True):
    """A partition as of its last commit. ``writer``: the worker that has it."""

    writer: str
    jobs: tuple[StoredJob, ...] = ()
    pending: tuple[Effect, ...] = ()


class Partition:
    """The partition ``number``; everything is for one loop, ``resume`` comes first.

    writer: the name of this worker, new with each start. load: lines per second, in the last
    minute that was not read again.
    """

    def __init__(
        self,
        number: int,
        cluster: Cluster,
        bucket: Bucket,
        writer: str,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.number = number
        self.load = 0.0
        self._lines = 0
        self._measured_until = 0.0
        self.readers: Sequence[StreamReader] = ()
        self._cluster = cluster
        self._bucket = bucket
        self._writer = writer
        self._monotonic = monotonic
        self._head = Head(writer)
        self._revision = 0
        self._stored: dict[JobId, StoredJob] = {}
        # The time that the stream has reached, and the time of the next evaluation.
        self.time = 0.0
        self._evaluate_at = 0.0
        self._started_at = wall()
        # While messages from before this worker had the partition are read.
        self._is_catching_up = True
        # By address: the last batch of each node, and when it came.
        self._received: dict[str, tuple[BatchId, float]] = {}
        self._busy = asyncio.Lock()
        self._is_closed = False
        self._uncommitted: list[Change] = []
        self._updated: list[Change] = []

    async def resume(self) -> tuple[list[Anomaly], list[Change]]:
        """Continue from the last commit, and become the writer of the next one.

        Return the anomalies that earlier workers have reported, and the changes on which they may
        not have acted. Raises BusError, ConflictError if another worker does the same.
        """
        found = await self._bucket.get(f"{self.number}.head")
        head, revision = (Head(""), 0) if found is None else (_decode_head(found[0]), found[1])
        jobs = [job for stored in head.jobs if (job := await self._read(stored)) is not None]
        await self._put_head(head.jobs, head.pending, revision)
        self._stored = {stored.id: stored for stored in head.jobs}
        with self._cluster.lock:
            self._cluster.saved |= {name: job for job in jobs for name in job.names}
        changes = [effect.change for effect in head.pending]
        return list(_reported(jobs, {change.anomaly.id for change in changes})), changes

    @property
    def read_since(self) -> float:
        """The time of the stream from which to read."""
        times = [stored.time for stored in self._stored.values()]
        return max(0.0, min(times) - LIVE_S) if times else 0.0

    def close(self) -> None:
        """Remove the partition's jobs and nodes, and ignore later messages."""
        with self._cluster.lock:
            self._is_closed = True
            self._cluster.remove_partition(self.number)
            for address in self._received:
                self._cluster.remove_node(address)
            for change in self._uncommitted:
                self._cluster.uncommitted.pop(change.anomaly.id, None)
            self._uncommitted.clear()

    def measure(self) -> None:
        """Take the new lines since the last call into the load.

        It is their number per second of the stream: what had to wait is read in a hurry.
        """
        passed_s = self.time - self._measured_until
        if passed_s > 0.0:
            earlier = FORGETTING**passed_s
            self.load = earlier * self.load + (1 - earlier) * self._lines / passed_s
            self._lines, self._measured_until = 0, self.time
        elif not (self._is_catching_up or self._cluster.jobs_of(self.number)):
            # Its stream may stand still from now on.
            self.load = 0.0

    def note_silent(self) -> None:
        """Note which nodes are silent, end the ranks of those silent for long, and forget these."""
        now = self._monotonic()
        with self._cluster.lock:
            for address, (_, at) in list(self._received.items()):
                node = self._cluster.nodes[address]
                if now - at > NODE_KEPT_S:
                    del self._received[address]
                    self._cluster.end_ranks(address, self.time)
                    self._cluster.remove_node(address)
                elif now - at > SILENT_S:
                    node.up, node.reason = False, f"no record of it for {SILENT_S:.0f} s"

    # --- messages ---

    def feed(self, message: StreamMessage) -> None:
        """Apply a message. Invalid messages are counted."""
        with self._cluster.lock:
            if self._is_closed:
                return
            try:
                of_node, number, who = read_subject(message.subject)
                batch = read_batch_id(message.ident)
                if number != self.number:
                    raise ValueError("another partition")
            except ValueError:
                self._cluster.refused["bad_subject"] += 1
                return
            self.time = max(self.time, message.at - (BEHIND_S if of_node else 0.0))
            self._is_catching_up = message.at < self._started_at
            self._cluster.is_catching_up = self._is_catching_up
            if self._is_catching_up:
                self._lines, self._measured_until = 0, self.time
            node = self._node(who, of_node)
            if node is not None and self._is_new(node.target.address, batch):
                self._feed(node, message.content, message.at)
            if self.time >= self._evaluate_at:
                self._evaluate_at = self.time + EVALUATE_INTERVAL_S
                self._evaluate()

    def _node(self, who: Publisher, of_node: bool) -> Node | None:
        target = target_of(who, None if of_node else self.number)
        node = self._cluster.nodes.get(target.address)
        if node is None and len(self._received) >= MAX_TARGETS:
            self._cluster.refused["too_many_agents"] += 1
            return None
        try:
            return node or self._cluster.add_node(target)
        except AgentError:
            self._cluster.refused["bad_subject"] += 1
            return None

    def _is_new(self, address: str, batch: BatchId) -> bool:
        last, _ = self._received.get(address, (None, 0.0))
        if last is not None and last.boot == batch.boot and batch.number <= last.number:
            return False
        if last is not None and last.boot != batch.boot:
            self._cluster.nodes[address].await_reports(self.time)
        self._received[address] = batch, self._monotonic()
        return True

    def _feed(self, node: Node, content: bytes, at: float) -> None:
        try:
            lines = unpack(content)
            self._lines += len(lines)
            self._cluster.feed(node.target.address, lines, at)
        except ValueError:
            node.refused["unreadable"] += 1
        except AgentError:
            node.refused["other_node"] += 1
        node.up, node.reason = True, ""

    def _evaluate(self) -> None:
        for change in self._cluster.evaluate(self.time, self.number):
            if change.what == "updated":
                self._updated.append(change)
            else:
                self._uncommitted.append(change)
                self._cluster.uncommitted[change.anomaly.id] = change.what

    # --- commits ---

    async def advance(self, *, everything: bool = False) -> list[Change]:
        """Commit the new changes, and return them. everything: the state of each job as well.

        Raises ConflictError if another worker has the partition, BusError.
        """
        async with self._busy:
            return [] if self._is_closed else await self._advance(everything)

    async def _advance(self, everything: bool) -> list[Change]:
        cluster = self._cluster
        with self._cluster.lock:
            changes = list(self._uncommitted)
            jobs = cluster.jobs_of(self.number)
            changed = {change.anomaly.job_id for change in changes}
            changed |= jobs.keys() if everything else set()
            saved = cluster.to_save(self.time, changed, self.number)
            updated, self._updated = self._updated, []
            is_forgotten = self._forget_jobs()
        for job in saved:
            await self._save(job)
        oldest = self.time - (HANDED_OVER_S if everything else PENDING_S)
        pending = tuple(effect for effect in self._head.pending if effect.time >= oldest)
        if saved or changes or is_forgotten or len(pending) != len(self._head.pending):
            pending += tuple(Effect(self.time, change) for change in changes)
            await self._put_head(tuple(self._stored.values()), pending, self._revision)
            with self._cluster.lock:
                for change in changes:
                    cluster.uncommitted.pop(change.anomaly.id, None)
                del self._uncommitted[: len(changes)]
                cluster.uncommitted |= {one.anomaly.id: one.what for one in self._uncommitted}
        return [*changes, *updated]

    def _forget_jobs(self) -> bool:
        """Forget the states of jobs that have ended or sent no records for long."""
        before, live = self._stored, self._cluster.jobs_of(self.number)
        forgotten, oldest = set(self._cluster.forgotten), self.time - JOB_KEPT_S
        self._cluster.forgotten = [one for one in forgotten if partition_of(one) != self.number]
        self._stored = {
            job: stored
            for job, stored in before.items()
            if job not in forgotten and (job in live or stored.time >= oldest)
        }
        return len(self._stored) < len(before)

    # --- the bucket ---

    async def _put_head(
        self, jobs: tuple[StoredJob, ...], pending: tuple[Effect, ...], revision: int
    ) -> None:
        head = Head(self._writer, jobs, pending)
        content = msgspec.msgpack.encode(head)
        self._revision = await self._bucket.put(f"{self.number}.head", content, revision)
        self._head = head

    async def _save(self, job: SavedJob) -> None:
        """Write the state of a job under other keys than the state before. Raises BusError."""
        content = await asyncio.to_thread(lambda: pack(msgspec.msgpack.encode(job)))
        digest = hashlib.sha256("\0".join(job.id).encode(errors="replace")).hexdigest()[:24]
        key = f"{self.number}.{digest}.{self._writer}.0"
        before = self._stored.get(job.id)
        if before is not None and before.key == key:
            key = f"{key[:-1]}1"
        starts = range(0, len(content), MAX_MESSAGE_BYTES)
        for number, start in enumerate(starts):
            chunk = content[start : start + MAX_MESSAGE_BYTES]
            await self._bucket.put(f"{key}.{number}", chunk)
        self._stored[job.id] = StoredJob(job.id, key, len(starts), job.time)

    async def _read(self, stored: StoredJob) -> SavedJob | None:
        chunks: list[bytes] = []
        for number in range(min(stored.chunks, MAX_CHUNKS)):
            found = await self._bucket.get(f"{stored.key}.{number}")
            chunks.append(b"" if found is None else found[0])
        try:
            content = unpack_bytes(b"".join(chunks), MAX_STATE_BYTES)
            return msgspec.msgpack.decode(content, type=SavedJob)
        except (ValueError, msgspec.MsgspecError) as error:
            logger.warning("the state of %s cannot be read: %s", stored.id.name, error)
            return None


def _decode_head(content: bytes) -> Head:
    try:
        return msgspec.msgpack.decode(content, type=Head)
    except (ValueError, msgspec.MsgspecError) as error:
        logger.warning("a partition's head cannot be read: %s", error)
        return Head("")


def _reported(jobs: Iterable[SavedJob], pending: set[str]) -> Iterator[Anomaly]:
    for job in jobs:
        for anomaly in (*job.history, *job.active):
            ident = ident_of(job.id, anomaly)
            if ident not in pending and anomaly.id not in job.left:
                yield replace(anomaly, id=ident)


def target_of(who: Publisher, partition: int | None) -> Target:
    """Return the agent as the rest of the fleet knows it; partition: of the jobs in these lines."""
    name = who.node if who.owner is None else f"{who.owner}:{who.node}"
    address = name if partition is None else f"{partition}/{name}"
    labels = {} if who.owner is None else {"owner": who.owner}
    return Target(address, labels, node=who.node, partition=partition)
