"""Divides the partitions among the workers, by leases in a bucket and greetings with loads.

A lease decides which worker has a partition: it is renewed by revision and expires without renewal.
Greetings only spread the work: each worker sends the loads of its partitions. A worker below its
share takes free partitions, an overloaded one gives some of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Annotated

import msgspec

from warpwatch_runtime.bus import Bucket, ConflictError
from warpwatch_telemetry.bus_messages import PARTITIONS

# Three may fail before the time in which a lease is certain is over.
RENEW_INTERVAL_S = 2.5
# Less than a lease lasts in the bucket, which knows nothing of this worker's pauses.
CERTAIN_S = 10.0
# A worker without a greeting for this time has exited: its leases end soon.
EXITED_S = 8.0
# A partition without records: it costs its commits and its place.
IDLE_LOAD = 1.0
# Moving a partition repeats the work of some minutes: it must be worth it.
LEAST_GAIN = 0.05
# A worker that starts listens first.
LISTEN_S = 3.0
# The lease for work that only one worker may do at a time.
_EXCLUSIVE = PARTITIONS


class Greeting(msgspec.Struct, frozen=True):
    """A worker's message to the others: its name, and the load of each of its partitions."""

    worker: str
    loads: dict[Annotated[int, msgspec.Meta(ge=0, lt=PARTITIONS)], float]


class PartitionLeases:
    """The leases of this worker in the bucket. Everything raises BusError."""

    def __init__(
        self, bucket: Bucket, worker: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self.bucket = bucket
        self._worker = worker.encode()
        self._monotonic = monotonic
        self._revisions: dict[int, int] = {}
        self._certain_until: dict[int, float] = {}

    def is_certain(self, partition: int) -> bool:
        """Return whether no other worker can have the partition."""
        return self._monotonic() < self._certain_until.get(partition, float("-inf"))

    async def acquire(self, partition: int) -> bool:
        """Return whether the partition was free, and is this worker's now."""
        try:
            await self._write(partition, 0)
        except ConflictError:
            return False
        return True

    async def renew(self, partition: int) -> bool:
        """Return whether it is still this worker's; one that has expired may be had again."""
        if partition not in self._revisions:
            return True  # it was released meanwhile
        try:
            await self._write(partition, self._revisions[partition])
        except ConflictError:
            found = await self.bucket.get(_key(partition))
            if found is None:
                return await self.acquire(partition)
            # The reply to the last renewal may have been lost.
            if found[0] != self._worker:
                self.drop(partition)
                return False
            self._revisions[partition] = found[1]
        return True

    async def release(self, partition: int) -> None:
        self.drop(partition)
        found = await self.bucket.get(_key(partition))
        # A renewal may have been on its way.
        if found is not None and found[0] == self._worker:
            await self.bucket.remove(_key(partition), found[1])

    def drop(self, partition: int) -> None:
        """Forget a lease that another has, or that is left to expire."""
        self._revisions.pop(partition, None)
        self._certain_until.pop(partition, None)

    async def alone(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work unless another worker is doing it."""
        if await self.acquire(_EXCLUSIVE):
            try:
                async with asyncio.timeout(CERTAIN_S):
                    await work()
            finally:
                await self.release(_EXCLUSIVE)

    async def _write(self, partition: int, revision: int) -> None:
        started = self._monotonic()
        self._revisions[partition] = await self.bucket.put(_key(partition), self._worker, revision)
        self._certain_until[partition] = started + CERTAIN_S


def _key(partition: int) -> str:
    return f"p.{partition}"


class Shares:
    """The partitions of all workers by their greetings, and those that this one takes or gives."""

    def __init__(self, worker: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._monotonic = monotonic
        self._started_at = monotonic()
        self._greetings: dict[str, tuple[float, Greeting]] = {}
        # The load of each partition that its worker reported last.
        self._loads: dict[int, float] = {}

    def receive(self, greeting: Greeting) -> None:
        if greeting.worker != self._worker:
            self._greetings[greeting.worker] = self._monotonic(), greeting
            self._loads |= greeting.loads

    def load_of(self, partition: int) -> float:
        """Return the load that its last worker reported, 0 if none has."""
        return max(0.0, self._loads.get(partition, IDLE_LOAD) - IDLE_LOAD)

    def others(self) -> dict[str, Mapping[int, float]]:
        """Return the partitions of the other live workers, with their loads."""
        oldest = self._monotonic() - EXITED_S
        self._greetings = {who: one for who, one in self._greetings.items() if one[0] > oldest}
        return {who: greeting.loads for who, (_, greeting) in self._greetings.items()}

    def unassigned(self, own: Collection[int]) -> set[int]:
        """Return the partitions without a worker."""
        of_others = set().union(*self.others().values())
        return set(range(PARTITIONS)) - of_others - set(own)

    def to_take(self, own: Mapping[int, float]) -> list[int]:
        """Return free partitions for which this worker has room."""
        others, free = self.others(), sorted(self.unassigned(own))
        if self._monotonic() - self._started_at < LISTEN_S:
            return []
        loads = {number: self._loads.get(number, IDLE_LOAD) for number in free}
        sums = {name: sum(one.values()) for name, one in others.items()}
        sums[self._worker] = sum(own.values())
        room = (sum(sums.values()) + sum(loads.values())) / len(sums) - sums[self._worker]
        is_least = min(sums, key=lambda name: (sums[name], name)) == self._worker
        # Each worker starts with partitions of its own, so that no two try the same.
        place, count = sorted(sums).index(self._worker), len(sums)
        turns = {number: (index - place) % count for index, number in enumerate(free)}
        taken: list[int] = []
        for number in sorted(free, key=lambda number: turns[number]):
            # If nobody has room for half of a partition, the least loaded worker takes one.
            if room > loads[number] / 2 or (is_least and not taken):
                taken.append(number)
                room -= loads[number]
        return taken

    def to_give(self, own: Mapping[int, float], busy: Collection[int] = ()) -> list[int]:
        """Return the partitions that others should have, so that the most loaded has least.

        It gives at most what it has above the mean: other workers give to an idle one, too.
        busy: the partitions that stay.
        """
        sums = {name: sum(loads.values()) for name, loads in self.others().items()}
        load = sum(own.values())
        left = {number: load for number, load in own.items() if number not in busy}
        fair = (sum(sums.values()) + load) / (len(sums) + 1)
        # If a partition has no worker, one that was given before is still on its way.
        if not sums or load < (1 + LEAST_GAIN) * fair or self.unassigned(own):
            return []
        given: list[int] = []
        while left:
            name = min(sums, key=lambda one: sums[one])
            best = _best(left, load, sums[name])
            if sums[name] + left[best] >= load or load - left[best] / 2 < fair:
                break
            moved = left.pop(best)
            load, sums[name] = load - moved, sums[name] + moved
            given.append(best)
        return given


def _best(loads: Mapping[int, float], mine: float, least: float) -> int:
    """Return the partition after whose move the more loaded of the two has least."""
    return min(sorted(loads), key=lambda one: max(mine - loads[one], least + loads[one]))
