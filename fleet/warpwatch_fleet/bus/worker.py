"""A worker: has some of the partitions, reads their records, and hands them over in order."""

from __future__ import annotations

import asyncio
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
from warpwatch_fleet.bus.streams import LEASES, STATES
from warpwatch_fleet.cluster import Cluster
from warpwatch_fleet.config import FleetFile
from warpwatch_fleet.source import Round
from warpwatch_runtime.bus import Bucket, Bus, BusError, ConflictError, StreamMessage, StreamReader
from warpwatch_runtime.log_output import Complaint
from warpwatch_telemetry.anomalies import Anomaly
from warpwatch_telemetry.bus_messages import NODES, PARTITIONS, RECORDS, STREAM, WORKERS

logger = logging.getLogger(__name__)

SHARE_INTERVAL_S = 1.0
# A worker may take half of the partitions within two rounds.
MAX_TAKEN_AT_ONCE = 16
# The share of the earlier load in the new mean.
FORGETTING = 0.8
_HELLO = f"{WORKERS}.hello"

Answer = Callable[[str, bytes], Awaitable[bytes]]


class BusSource:
    """Implements ``source.FleetSource``.

    remember: receives the anomalies that earlier workers have reported. answer: replies to other
    workers. busy: returns the partitions that should stay here for now.
    """

    partitions = PARTITIONS

    def __init__(
        self,
        config: FleetFile,
        remember: Callable[[Sequence[Anomaly]], None],
        answer: Answer | None = None,
        busy: Callable[[], set[int]] = set,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = secrets.token_hex(6)
        self.bus = Bus(config.bus, f"fleet.{self.worker}")
        self.links = BusLinks(self.bus)
        self.view = Cluster(config.detection, config.anomalies)
        self.rounds: tuple[Round, ...] = (
            (RENEW_INTERVAL_S, self._renew), (SHARE_INTERVAL_S, self._share),
        )  # fmt: skip
        self.shares = Shares(self.worker, monotonic)
        self._url = config.bus.url
        self._remember = remember
        self._answer = answer
        self._busy = busy
        self._monotonic = monotonic
        self._leases: PartitionLeases
        self._states: Bucket
        # The numbers of ``add_up`` lie with the leases: they last as long.
        self._counts: Bucket
        self._held: dict[int, Partition] = {}
        # The partitions whose lease was uncertain for a while: they are read anew from their head.
        self._stale: set[int] = set()
        # Changes on which earlier workers may not have acted.
        self._pending: list[Change] = []
        self._complaint = Complaint(logger, logging.WARNING)

    @property
    def missing(self) -> tuple[str, ...]:
        if not self.bus.is_connected:
            return (f"the bus {self._url} is away",)
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
                self._counts = await self.bus.bucket(LEASES)
                self._states = await self.bus.bucket(STATES)
                break
            except BusError as error:
                self._complaint.make(
                    "the bus has no buckets of a fleet, run `warpwatch fleet --create-streams`: %s",
                    error,
                )
                await asyncio.sleep(SHARE_INTERVAL_S)
        self._leases = PartitionLeases(self._counts, self.worker, self._monotonic)
        self.shares = Shares(self.worker, self._monotonic)
        await self.bus.listen(_HELLO, self._receive)
        if self._answer is not None:
            await self.bus.answer(f"{WORKERS}.{self.worker}", self._answer)

    def _receive(self, content: bytes) -> None:
        try:
            self.shares.receive(msgspec.msgpack.decode(content, type=Greeting))
        except (ValueError, msgspec.MsgspecError) as error:
            self._complaint.make("a worker of another version greets: %s", error)

    # --- leases ---

    async def _renew(self) -> None:
        await asyncio.gather(*(self._renew_one(number) for number in list(self._held)))

    async def _renew_one(self, number: int) -> None:
        try:
            if not await self._leases.renew(number):
                logger.warning("partition %d is another worker's now", number)
                await self._lose(number)
            elif number in self._stale:
                await self._lose(number)
                await self._begin(number)
            else:
                for reader in self._held[number].readers:
                    await reader.check()
        except ConflictError:
            await self._lose(number)
        except BusError as error:
            self._complaint.make("partitions are kept as they are: %s", error)

    async def _share(self) -> None:
        for partition in self._held.values():
            lines, partition.lines = partition.lines, 0
            partition.load *= FORGETTING
            partition.load += (1 - FORGETTING) * lines / SHARE_INTERVAL_S
        own = {number: IDLE_LOAD + partition.load for number, partition in self._held.items()}
        try:
            await self.bus.send(_HELLO, msgspec.msgpack.encode(Greeting(self.worker, own)))
            for number in self.shares.to_give(own, self._busy()):
                await self._give(number)
            wanted = self.shares.to_take(own)[:MAX_TAKEN_AT_ONCE]
            acquired = await asyncio.gather(*map(self._leases.acquire, wanted))
            for number, is_acquired in zip(wanted, acquired, strict=True):
                if is_acquired:
                    await self._begin(number)
        except BusError as error:
            self._complaint.make("partitions are not shared now: %s", error)

    async def _begin(self, number: int) -> None:
        """Continue from the partition's head. Raises BusError."""
        self._stale.discard(number)
        partition = Partition(number, self.view, self._states, self.worker, self._monotonic)
        try:
            reported, pending = await partition.resume()
        except BusError:
            self._leases.drop(number)
            raise
        await asyncio.to_thread(self._remember, reported)
        partition.load = self.shares.load_of(number)
        self._pending += pending

        def receive(message: StreamMessage) -> None:
            if self._leases.is_certain(number):
                partition.feed(message)
            else:
                self._stale.add(number)

        since = partition.read_since
        partition.readers = [
            StreamReader(self.bus, STREAM, f"{kind}.{number}.>", since, receive)
            for kind in (RECORDS, NODES)
        ]
        # If a reader does not start, ``check`` starts it.
        self._held[number] = partition
        for reader in partition.readers:
            await reader.start()

    async def _give(self, number: int) -> None:
        """Hand a partition over, with the states of all of its jobs."""
        partition = self._held[number]
        for reader in partition.readers:
            await reader.stop()
        try:
            self._pending += await partition.advance(everything=True)
        finally:
            await self._lose(number)
        await self._leases.release(number)

    async def _lose(self, number: int) -> None:
        partition = self._held.pop(number, None)
        if partition is not None:
            partition.close()
            for reader in partition.readers:
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

    async def alone(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            if self._held:
                await self._leases.alone(work)
        except BusError as error:
            self._complaint.make("work of one worker at a time waits for the bus: %s", error)

    async def add_up(self, count: int) -> int:
        await self._counts.put(f"count.{self.worker}", b"%d" % count)
        found = [await self._counts.get(f"count.{one}") for one in self.shares.others()]
        return count + sum(int(one[0]) for one in found if one is not None)

    async def close(self) -> None:
        for number in list(self._held):
            try:
                await asyncio.wait_for(self._give(number), 1.0)
            except (BusError, TimeoutError) as error:
                logger.warning("the lease of partition %d is left to expire: %s", number, error)
        await self.bus.close()
