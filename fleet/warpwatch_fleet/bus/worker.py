"""A worker: has some of the partitions, reads their records, and hands them over in order."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from warpwatch_detection.anomalies.register import Change
from warpwatch_fleet.agent_link import BusLinks
from warpwatch_fleet.bus.partition import Partition
from warpwatch_fleet.bus.sharing import (
    IDLE_LOAD,
    RENEW_INTERVAL_S,
    Greeting,
    PartitionLeases,
    Shares,
)
from warpwatch_fleet.bus.streams import LEASES, SESSIONS, STATES
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.config import FleetFile
from warpwatch_fleet.source import FleetSource
from warpwatch_runtime.bus import Bucket, Bus, BusError, ConflictError, StreamMessage, StreamReader
from warpwatch_runtime.log_output import Complaint
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.bus_messages import NODES, PARTITIONS, RECORDS, STREAM, WORKERS

logger = logging.getLogger(__name__)

SHARE_INTERVAL_S = 1.0
# A worker may take half of the partitions within two rounds.
MAX_TAKEN_AT_ONCE = 16
_HELLO = f"{WORKERS}.hello"

Reply = Callable[[str, bytes], Awaitable[bytes]]


class BusSource(FleetSource):
    """The records of this worker's partitions.

    remember: receives the anomalies that earlier workers have reported. reply: returns the replies
    to other workers. busy: returns the partitions that should stay here for now.
    """

    partitions = PARTITIONS
    links: BusLinks

    def __init__(
        self,
        config: FleetFile,
        remember: Callable[[Sequence[Anomaly]], None],
        reply: Reply | None = None,
        busy: Callable[[], set[int]] = set,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = secrets.token_hex(6)
        self.bus = Bus(config.bus, f"fleet.{self.worker}")
        # A connection of its own: leases do not wait behind records that are read again.
        self._records = Bus(config.bus, f"fleet.{self.worker}.records")
        self.links = BusLinks(self.bus)
        self.view = Cluster(config.detection, config.anomalies)
        self.rounds = (
            (RENEW_INTERVAL_S, self._renew), (RENEW_INTERVAL_S, self._check),
            (SHARE_INTERVAL_S, self._greet), (SHARE_INTERVAL_S, self._share),
            (RENEW_INTERVAL_S, self._reopen),
        )  # fmt: skip
        self.shares = Shares(self.worker, monotonic)
        self.url = config.bus.url
        self._remember = remember
        self._reply = reply
        self._busy = busy
        self._monotonic = monotonic
        self._leases: PartitionLeases
        self.sessions: Bucket
        self._states: Bucket
        # The results of ``alone`` lie with the leases: they last as long.
        self._counts: Bucket
        self._held: dict[int, Partition] = {}
        # A slow one delays neither greetings nor other partitions.
        self._resuming: dict[int, asyncio.Task[None]] = {}
        # The partitions whose lease was uncertain for a while: they are read anew from their head.
        self._stale: set[int] = set()
        # Changes on which earlier workers may not have acted.
        self._pending: list[Change] = []
        self._complaint = Complaint(logger, logging.WARNING)

    @property
    def missing(self) -> tuple[str, ...]:
        if not self.bus.is_connected:
            return (f"the bus {self.url} is away",)
        unassigned = ", ".join(map(str, sorted(self.shares.unassigned(self._held))))
        return (f"no worker has the partitions {unassigned}",) if unassigned else ()

    def evaluated(self) -> dict[str, float]:
        return {str(number): 1.0 for number in list(self._held)}

    async def start(self) -> None:
        await self._connect()
        self.links.loop = asyncio.get_running_loop()
        self._leases = PartitionLeases(self._counts, self.worker, self._monotonic)
        self.shares = Shares(self.worker, self._monotonic)

    async def _reopen(self) -> None:
        """Connect again if the server has ended a connection, and read all partitions anew."""
        if self.bus.is_closed or self._records.is_closed:
            await self.bus.close()
            await self._records.close()
            await self._connect()
            self._leases.bucket = self._counts
            self._stale |= self._held.keys() | self._resuming.keys()

    async def _connect(self) -> None:
        """Connect, and wait until there are stream and buckets."""
        await self.bus.connect()
        await self._records.connect()
        while True:
            try:
                self._counts = await self.bus.bucket(LEASES)
                self._states = await self.bus.bucket(STATES)
                self.sessions = await self.bus.bucket(SESSIONS)
                break
            except BusError as error:
                self._complaint.make(
                    "the bus has no buckets of a fleet, run `warpwatch fleet --create-streams`: %s",
                    error,
                )
                await asyncio.sleep(SHARE_INTERVAL_S)
        await self.bus.listen(_HELLO, self._receive)
        if self._reply is not None:
            await self.bus.serve(f"{WORKERS}.{self.worker}", self._reply)

    def _receive(self, content: bytes) -> None:
        try:
            self.shares.receive(msgspec.msgpack.decode(content, type=Greeting))
        except (ValueError, msgspec.MsgspecError) as error:
            self._complaint.make("a worker of another version greets: %s", error)

    # --- leases ---

    async def _renew(self) -> None:
        """Renew all leases, and do nothing else: no partition delays the lease of another."""
        await asyncio.gather(*map(self._renew_one, [*self._held, *self._resuming]))

    async def _renew_one(self, number: int) -> None:
        try:
            if not await self._leases.renew(number):
                logger.warning("partition %d is another worker's now", number)
                await self._lose(number)
        except BusError as error:
            self._complaint.make("partitions are kept as they are: %s", error)

    async def _check(self) -> None:
        await asyncio.gather(*map(self._check_one, list(self._held)))

    async def _check_one(self, number: int) -> None:
        """Read a stale partition anew, or start readers that do not read."""
        try:
            if number in self._stale and self._leases.is_certain(number):
                await self._lose(number)
                self._begin(number)
            elif number in self._held:
                self._held[number].note_silent()
                for reader in self._held[number].readers:
                    await reader.check()
        except BusError as error:
            self._complaint.make("partition %d cannot be read: %s", number, error)

    async def _greet(self) -> None:
        for partition in self._held.values():
            partition.measure()
        try:
            greeting = Greeting(self.worker, self._loads())
            await self.bus.send(_HELLO, msgspec.msgpack.encode(greeting))
        except BusError as error:
            self._complaint.make("other workers do not hear of this one: %s", error)

    def _loads(self) -> dict[int, float]:
        """Return the load of each partition whose lease is this worker's."""
        resuming = {number: self.shares.load_of(number) for number in self._resuming}
        held = {number: partition.load for number, partition in self._held.items()}
        return {number: IDLE_LOAD + load for number, load in (resuming | held).items()}

    async def _share(self) -> None:
        own = self._loads()
        try:
            given = self.shares.to_give(own, self._busy() | self._resuming.keys())
            await asyncio.gather(*map(self._give, given))
            wanted = self.shares.to_take(own)[:MAX_TAKEN_AT_ONCE]
            acquired = await asyncio.gather(*map(self._leases.acquire, wanted))
            for number in itertools.compress(wanted, acquired):
                self._begin(number)
        except BusError as error:
            self._complaint.make("partitions are not shared now: %s", error)

    def _begin(self, number: int) -> None:
        self._resuming[number] = asyncio.create_task(self._resume(number))

    async def _resume(self, number: int) -> None:
        """Continue from the partition's head, or let the lease expire."""
        self._stale.discard(number)
        partition = Partition(number, self.view, self._states, self.worker, self._monotonic)
        try:
            reported, pending = await partition.resume()
            await asyncio.to_thread(self._remember, reported)
        except BusError as error:
            self._complaint.make("partition %d cannot be read: %s", number, error)
            return
        finally:
            del self._resuming[number]
        if not self._leases.is_certain(number):
            return
        partition.load = self.shares.load_of(number)
        self._pending += pending

        def receive(message: StreamMessage) -> None:
            if self._leases.is_certain(number):
                partition.feed(message)
            else:
                self._stale.add(number)

        since = partition.read_since
        partition.readers = [
            StreamReader(self._records, STREAM, f"{kind}.{number}.>", since, receive)
            for kind in (RECORDS, NODES)
        ]
        self._held[number] = partition
        await self._check_one(number)

    async def _give(self, number: int) -> None:
        """Hand a partition over with the states of all of its jobs, or let its lease expire."""
        partition = self._held[number]
        try:
            for reader in partition.readers:
                await reader.stop()
            self._pending += await partition.advance(everything=True)
            await self._lose(number)
            await self._leases.release(number)
        except BusError as error:
            await self._lose(number)
            self._complaint.make("the lease of partition %d is left to expire: %s", number, error)

    async def _lose(self, number: int) -> None:
        partition = self._held.pop(number, None)
        if partition is not None:
            partition.close()
            for reader in partition.readers:
                await reader.stop()

    # --- changes ---

    async def evaluate(self) -> list[Change]:
        """Commit the changes of all partitions, and return them."""
        with self.view.lock:
            self.view.drop_waiting()
        certain = [one for one in list(self._held) if self._leases.is_certain(one)]
        results = await asyncio.gather(*(self._advance(number) for number in certain))
        changes, self._pending = self._pending, []
        return changes + [change for found in results for change in found]

    async def _advance(self, number: int) -> list[Change]:
        partition = self._held.get(number)
        if partition is None or number in self._stale:
            return []
        try:
            return await partition.advance()
        except ConflictError:
            # Another worker has committed, or the reply to a commit was lost: the head decides.
            self._stale.add(number)
        except BusError as error:
            self._complaint.make("changes of anomalies wait for the bus: %s", error)
        return []

    async def alone(self, work: Callable[[int], Awaitable[int]]) -> None:
        async def counted() -> None:
            found = [await self._counts.get(f"count.{one}") for one in self.shares.others()]
            count = await work(sum(int(one[0]) for one in found if one is not None))
            await self._counts.put(f"count.{self.worker}", b"%d" % count)

        try:
            if self._held:
                await self._leases.alone(counted)
        except BusError as error:
            self._complaint.make("work of one worker at a time waits for the bus: %s", error)

    async def close(self) -> None:
        for task in self._resuming.values():
            task.cancel()
        for number in list(self._held):
            # While the bus is away, each would take its whole second.
            if self.bus.is_connected:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._give(number), 1.0)
        await self._records.close()
        await self.bus.close()
