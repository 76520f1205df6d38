"""A worker: has some of the partitions, reads their records, and gives them up in order."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from warpwatch_detection.anomalies.register import Change
from warpwatch_fleet.bus.links import BusLinks
from warpwatch_fleet.bus.partition import Partition
from warpwatch_fleet.bus.partitions import Partitions
from warpwatch_fleet.bus.sharing import IDLE_LOAD, RENEW_INTERVAL_S, Greeting, Leases, Shares
from warpwatch_fleet.bus.states import Committed, PartitionStates
from warpwatch_fleet.bus.streams import LEASES, STATES
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.config import FleetFile
from warpwatch_fleet.jobs import ident_of
from warpwatch_fleet.source import Round
from warpwatch_runtime.bus import Bus, BusError, ConflictError, StreamMessage, StreamReader
from warpwatch_runtime.log_output import Complaint
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.bus_messages import NODES, PARTITIONS, RECORDS, STREAM, WORKERS

logger = logging.getLogger(__name__)

SHARE_INTERVAL_S = 1.0
# A worker may be given half of the partitions at once.
MAX_TAKEN_AT_ONCE = 16
# The share of the earlier load in the new mean.
FORGETTING = 0.8
_HELLO = f"{WORKERS}.hello"

Know = Callable[[Sequence[Anomaly]], None]


class _Held(NamedTuple):
    partition: Partition
    readers: tuple[StreamReader, StreamReader]


class BusSource:
    """Implements ``source.Source``. ``know``: receives anomalies that others reported before."""

    partitions = PARTITIONS

    def __init__(
        self,
        config: FleetFile,
        know: Know,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = secrets.token_hex(6)
        self.bus = Bus(config.bus, f"fleet.{self.worker}")
        self.links = BusLinks(self.bus)
        self.view = Partitions()
        self.rounds: tuple[Round, ...] = (
            (RENEW_INTERVAL_S, self._renew), (SHARE_INTERVAL_S, self._share),
        )  # fmt: skip
        self.shares = Shares(self.worker, monotonic)
        self._config = config
        self._know = know
        self._monotonic = monotonic
        self._leases: Leases
        self._states: PartitionStates
        self._held: dict[int, _Held] = {}
        # The partitions whose lease was uncertain for a while: they are read anew from their head.
        self._stale: set[int] = set()
        # The changes that earlier workers may not have acted on.
        self._pending: list[Change] = []
        # The partitions that should stay here for now.
        self.busy: Callable[[], set[int]] = set
        # Answers the requests of other workers.
        self.answers: Callable[[str, bytes], Awaitable[bytes]] | None = None
        self._complaint = Complaint(logger, logging.WARNING)

    @property
    def missing(self) -> tuple[str, ...]:
        if not self.bus.is_connected:
            return (f"the bus {self._config.bus.url} is away",)
        unassigned = sorted(self.shares.unassigned(self._held))
        if not unassigned:
            return ()
        return (f"no worker has the partitions {', '.join(map(str, unassigned))}",)

    def judged(self) -> dict[str, float]:
        return {str(number): 1.0 for number in list(self._held)}

    async def start(self) -> None:
        """Connect, and wait until there are stream and buckets."""
        self.links.loop = asyncio.get_running_loop()
        await self.bus.connect()
        while True:
            try:
                self._leases = Leases(await self.bus.bucket(LEASES), self.worker, self._monotonic)
                self._states = PartitionStates(await self.bus.bucket(STATES), self.worker)
                break
            except BusError as error:
                self._complaint.make(
                    "the bus has no buckets of a fleet, run `warpwatch fleet --create-streams`: %s",
                    error,
                )
                await asyncio.sleep(SHARE_INTERVAL_S)
        self.shares = Shares(self.worker, self._monotonic)
        await self.bus.listen(_HELLO, self._receive)
        if self.answers is not None:
            await self.bus.answer(f"{WORKERS}.{self.worker}", self.answers)

    def _receive(self, content: bytes) -> None:
        try:
            self.shares.receive(msgspec.msgpack.decode(content, type=Greeting))
        except (ValueError, msgspec.MsgspecError) as error:
            self._complaint.make("a worker of another version greets: %s", error)

    # --- leases ---

    async def _renew(self) -> None:
        await asyncio.gather(*(self._renew_one(number) for number in list(self._held)))

    async def _renew_one(self, number: int) -> None:
        held = self._held[number]
        try:
            if not await self._leases.renew(number):
                logger.warning("partition %d is another worker's now", number)
                await self._lose(number)
                return
            if number in self._stale:
                self._stale.discard(number)
                await self._lose(number)
                await self._begin(number)
                return
            for reader in held.readers:
                await reader.check()
        except ConflictError:
            await self._lose(number)
        except BusError as error:
            self._complaint.make("partitions are kept as they are: %s", error)

    async def _share(self) -> None:
        for held in self._held.values():
            lines, held.partition.lines = held.partition.lines, 0
            held.partition.load *= FORGETTING
            held.partition.load += (1 - FORGETTING) * lines / SHARE_INTERVAL_S
        own = {number: IDLE_LOAD + held.partition.load for number, held in self._held.items()}
        try:
            await self.bus.send(_HELLO, msgspec.msgpack.encode(Greeting(self.worker, own)))
            for number in self.shares.to_give(own, self.busy()):
                await self._give(number)
            for number in self.shares.to_take(own)[:MAX_TAKEN_AT_ONCE]:
                if number not in self._held and await self._leases.acquire(number):
                    await self._begin(number)
        except BusError as error:
            self._complaint.make("partitions are not shared now: %s", error)

    async def _give(self, number: int) -> None:
        """Give a partition up, with all that is known of it."""
        held = self._held[number]
        for reader in held.readers:
            await reader.stop()
        try:
            self._pending += await held.partition.advance(everything=True)
        finally:
            await self._lose(number)
        await self._leases.release(number)

    # --- partitions ---

    async def _begin(self, number: int) -> None:
        """Continue from the partition's head. Raises BusError."""
        try:
            committed = await self._states.take(number)
        except BusError:
            self._leases.drop(number)
            raise
        await asyncio.to_thread(self._know, list(_raised(committed)))
        config = self._config
        cluster = Cluster(config.detection, config.anomalies, committed.saved, self.view)
        partition = Partition(number, cluster, self._states, committed, self._monotonic)
        partition.load = self.shares.load_of(number)
        self._pending += (effect.change for effect in committed.head.pending)

        def receive(message: StreamMessage) -> None:
            if self._leases.is_certain(number):
                partition.feed(message)
            else:
                self._stale.add(number)

        readers = (
            StreamReader(self.bus, STREAM, f"{RECORDS}.{number}.>", partition.begin, receive),
            StreamReader(self.bus, STREAM, f"{NODES}.{number}.>", partition.begin, receive),
        )
        with self.view.lock:
            self.view.put(number, cluster)
        try:
            for reader in readers:
                await reader.start()
        finally:
            # ``check`` starts what has failed.
            self._held[number] = _Held(partition, readers)

    async def _lose(self, number: int) -> None:
        held = self._held.pop(number, None)
        if held is None:
            return
        with self.view.lock:
            self.view.remove(number)
        for reader in held.readers:
            await reader.stop()

    # --- changes ---

    async def judge(self) -> list[Change]:
        """Commit the changes of all partitions, and return them."""
        with self.view.lock:
            self.view.drop_waiting()
        certain = [one for one in list(self._held) if self._leases.is_certain(one)]
        results = await asyncio.gather(*(self._advance(number) for number in certain))
        changes, self._pending = self._pending, []
        return changes + [change for found in results for change in found]

    async def _advance(self, number: int) -> list[Change]:
        held = self._held.get(number)
        if held is None or number in self._stale:
            return []
        try:
            return await held.partition.advance()
        except ConflictError:
            # Another has committed, or the answer to a commit was lost: the head knows.
            self._stale.add(number)
        except BusError as error:
            self._complaint.make("changes of anomalies wait for the bus: %s", error)
        return []

    async def alone(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            if self._held:
                await self._leases.alone(work)
        except BusError as error:
            self._complaint.make("what one worker does alone waits for the bus: %s", error)

    async def close(self) -> None:
        for number in list(self._held):
            try:
                await asyncio.wait_for(self._give(number), 1.0)
            except (BusError, TimeoutError) as error:
                logger.warning("the lease of partition %d is left to expire: %s", number, error)
        await self.bus.close()


def _raised(committed: Committed) -> Iterable[Anomaly]:
    """Yield the anomalies that earlier workers have reported, with their ids."""
    pending = {effect.change.anomaly.id for effect in committed.head.pending}
    for job in {id(one): one for one in committed.saved.values()}.values():
        for anomaly in (*job.history, *job.active):
            ident = ident_of(job.id, anomaly)
            if ident not in pending and anomaly.id not in job.left:
                yield replace(anomaly, id=ident)
