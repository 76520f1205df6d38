"""Decides which worker has which partition: leases in a bucket, and greetings with loads.

The leases in the bucket decide which worker has a partition: a lease is renewed by revision and
expires without renewal. Greetings only spread the work: each worker sends the loads of its
partitions. The least loaded one takes free partitions, an overloaded one gives some of its own.
"""

from __future__ import annotations

import asyncio
import random
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
GONE_S = 8.0
# A partition without records: it costs its commits and its place.
IDLE_LOAD = 1.0
# Moving a partition repeats the work of some minutes: it must be worth it.
LEAST_GAIN = 0.05
# A worker that starts listens first.
LISTEN_S = 3.0
# The lease of who does what only one worker may do at a time.
_ALONE = PARTITIONS


class Greeting(msgspec.Struct, frozen=True):
    """A worker's message to the others: its name, and the load of each of its partitions."""

    worker: str
    loads: dict[Annotated[int, msgspec.Meta(ge=0, lt=PARTITIONS)], float]


class Leases:
    """The leases of this worker in the bucket. Everything raises BusError."""

    def __init__(
        self, bucket: Bucket, worker: str, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._bucket = bucket
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
        try:
            await self._write(partition, self._revisions[partition])
        except ConflictError:
            found = await self._bucket.get(_key(partition))
            if found is None:
                return await self.acquire(partition)
            # The answer to the last renewal may have been lost.
            if found[0] != self._worker:
                self.drop(partition)
                return False
            self._revisions[partition] = found[1]
        return True

    async def release(self, partition: int) -> None:
        self.drop(partition)
        found = await self._bucket.get(_key(partition))
        # A renewal may have been on its way.
        if found is not None and found[0] == self._worker:
            await self._bucket.remove(_key(partition), found[1])

    def drop(self, partition: int) -> None:
        """Forget a lease that another has, or that is left to expire."""
        self._revisions.pop(partition, None)
        self._certain_until.pop(partition, None)

    async def alone(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do the work unless another worker is doing it."""
        if await self.acquire(_ALONE):
            try:
                async with asyncio.timeout(CERTAIN_S):
                    await work()
            finally:
                await self.release(_ALONE)

    async def _write(self, partition: int, revision: int) -> None:
        begun = self._monotonic()
        self._revisions[partition] = await self._bucket.put(_key(partition), self._worker, revision)
        self._certain_until[partition] = begun + CERTAIN_S


def _key(partition: int) -> str:
    return f"p.{partition}"


class Shares:
    """The partitions of all workers, by their greetings, and what this one should take or give."""

    def __init__(self, worker: str, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._monotonic = monotonic
        self._begun = monotonic()
        self._heard: dict[str, tuple[float, Greeting]] = {}
        # The load of each partition that its worker reported last.
        self._loads: dict[int, float] = {}
        # When this worker gave a partition up, which is then not for itself.
        self._given_at: dict[int, float] = {}
        # Since when no worker has reported a partition as its own.
        self._free_since: dict[int, float] = {}

    def receive(self, greeting: Greeting) -> None:
        if greeting.worker != self._worker:
            self._heard[greeting.worker] = self._monotonic(), greeting
            self._loads |= greeting.loads

    def load_of(self, partition: int) -> float:
        """Return the load that its last worker reported, 0 if none has."""
        return max(0.0, self._loads.get(partition, IDLE_LOAD) - IDLE_LOAD)

    def others(self) -> dict[str, Mapping[int, float]]:
        """Return the partitions of the other workers that live, with their loads."""
        now = self._monotonic()
        self._heard = {name: one for name, one in self._heard.items() if now - one[0] < GONE_S}
        return {name: greeting.loads for name, (_, greeting) in self._heard.items()}

    def unassigned(self, own: Collection[int]) -> set[int]:
        """Return the partitions without a worker."""
        of_others = set().union(*self.others().values())
        return set(range(PARTITIONS)) - of_others - set(own)

    def to_take(self, own: Mapping[int, float]) -> list[int]:
        """Return free partitions that this worker should try to get."""
        now, others = self._monotonic(), self.others()
        free = self.unassigned(own)
        free -= {one for one, at in self._given_at.items() if now - at < GONE_S}
        self._free_since = {one: self._free_since.get(one, now) for one in free}
        if now - self._begun < LISTEN_S or not free:
            return []
        counts = {name: len(loads) for name, loads in others.items()} | {self._worker: len(own)}
        sums = {name: sum(loads.values()) for name, loads in others.items()}
        sums[self._worker] = sum(own.values())
        order = sorted(counts, key=lambda name: (sums[name], counts[name], name))
        if len(order) == 1:
            return sorted(free)
        # Each in turn, the least loaded first; what somebody has left lie is for everybody.
        mine = sorted(free)[order.index(self._worker) :: len(order)]
        # The partitions that others give away are meant for the least loaded worker.
        if order[0] == self._worker:
            target = (sum(sums.values()) + IDLE_LOAD * len(free)) / len(order)
            room = max(1, int((target - sums[self._worker]) / IDLE_LOAD))
            mine = sorted(free)[:room] if room > len(mine) else mine
        late = [one for one, since in self._free_since.items() if now - since > GONE_S]
        return sorted({*mine, *random.sample(late, min(4, len(late)))})

    def to_give(self, own: Mapping[int, float], busy: Collection[int] = ()) -> list[int]:
        """Return the partitions that others should have, so that the most loaded has least.

        busy: the partitions that stay.
        """
        sums = {name: sum(loads.values()) for name, loads in self.others().items()}
        mine = sum(own.values())
        left = {number: load for number, load in own.items() if number not in busy}
        fair = (sum(sums.values()) + mine) / (len(sums) + 1)
        # If a partition has no worker, one that was given before is still on its way.
        if not sums or mine < (1 + LEAST_GAIN) * fair or self.unassigned(own):
            return []
        given: list[int] = []
        while left:
            name = min(sums, key=lambda one: sums[one])
            best = _best(left, mine, sums[name])
            if sums[name] + left[best] >= mine:
                break
            load = left.pop(best)
            mine, sums[name] = mine - load, sums[name] + load
            given.append(best)
        self._given_at |= dict.fromkeys(given, self._monotonic())
        return given


def _best(loads: Mapping[int, float], mine: float, least: float) -> int:
    """Return the partition after whose move the more loaded of the two has least."""

    def after(one: int) -> float:
        return max(mine - loads[one], least + loads[one])

    return min(sorted(loads), key=after)
