"""Keeps the state of a partition's jobs in a bucket: chunks, and one head that names them.

Only the head is changed by revision: a worker that has lost the partition cannot commit, and what
it writes has its own keys. The bucket forgets by age what no head names.
"""

from __future__ import annotations

import hashlib
import logging
from typing import NamedTuple

import msgspec

from warpwatch_detection.anomalies.register import Change
from warpwatch_fleet.memory import SavedJob
from warpwatch_runtime.bus import Bucket
from warpwatch_telemetry.bus_messages import MAX_MESSAGE_BYTES, pack, unpack_bytes
from warpwatch_telemetry.jobs import JobId

logger = logging.getLogger(__name__)

# A job of 100,000 ranks, packed.
MAX_CHUNKS = 512


class Place(msgspec.Struct, frozen=True):
    """Where a job's state is: ``key`` and the number of chunks below it. time: of the state."""

    id: JobId
    key: str
    chunks: int
    time: float


class Effect(msgspec.Struct, frozen=True):
    """A change that others have to learn, committed at ``time`` of the stream."""

    time: float
    change: Change


class Head(msgspec.Struct, frozen=True):
    """A partition as of its last commit. ``writer``: the worker that has it."""

    writer: str
    jobs: tuple[Place, ...] = ()
    pending: tuple[Effect, ...] = ()


class Committed(NamedTuple):
    """A head, its revision, and the states of its jobs by their names on nodes."""

    head: Head
    revision: int
    saved: dict[JobId, SavedJob]


class PartitionStates:
    """The heads and states. ``writer``: the name of this worker, new with each start."""

    def __init__(self, bucket: Bucket, writer: str) -> None:
        self._bucket = bucket
        self._writer = writer

    async def take(self, partition: int) -> Committed:
        """Return the last commit, and commit to be the one who has the partition.

        Raises BusError, ConflictError if another takes it at the same time.
        """
        key = _head(partition)
        found = await self._bucket.get(key)
        head, revision = (Head(""), 0) if found is None else (_decoded(found[0]), found[1])
        saved: dict[JobId, SavedJob] = {}
        for place in head.jobs:
            job = await self._read(place)
            if job is not None:
                saved |= dict.fromkeys(job.names, job)
        head = msgspec.structs.replace(head, writer=self._writer)
        return Committed(head, await self._bucket.put(key, _encode(head), revision), saved)

    async def save(self, partition: int, job: SavedJob, time: float, before: Place | None) -> Place:
        """Write the state of a job under other keys than ``before``'s. Raises BusError."""
        content = pack(_encode(job))
        digest = hashlib.sha256("\0".join(job.id).encode(errors="replace")).hexdigest()[:24]
        key = f"{partition}.{digest}.{self._writer}.0"
        if before is not None and before.key == key:
            key = f"{key[:-1]}1"
        starts = range(0, len(content), MAX_MESSAGE_BYTES)
        for number, begin in enumerate(starts):
            part = content[begin : begin + MAX_MESSAGE_BYTES]
            await self._bucket.put(f"{key}.{number}", part)
        return Place(job.id, key, len(starts), time)

    async def commit(self, partition: int, head: Head, revision: int) -> int:
        """Replace the head; return its revision. Raises ConflictError, BusError."""
        return await self._bucket.put(_head(partition), _encode(head), revision)

    async def _read(self, place: Place) -> SavedJob | None:
        parts: list[bytes] = []
        for number in range(min(place.chunks, MAX_CHUNKS)):
            found = await self._bucket.get(f"{place.key}.{number}")
            parts.append(b"" if found is None else found[0])
        try:
            return msgspec.msgpack.decode(unpack_bytes(b"".join(parts), 256 * 2**20), type=SavedJob)
        except (ValueError, msgspec.MsgspecError) as error:
            logger.warning("what is known of %s cannot be read: %s", place.id.name, error)
            return None


def _head(partition: int) -> str:
    return f"{partition}.head"


def _encode(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


def _decoded(content: bytes) -> Head:
    try:
        return msgspec.msgpack.decode(content, type=Head)
    except (ValueError, msgspec.MsgspecError) as error:
        logger.warning("a partition's head cannot be read: %s", error)
        return Head("")
