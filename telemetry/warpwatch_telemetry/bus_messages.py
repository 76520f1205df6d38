"""Defines the messages of agents and fleets on the bus: subjects, partitions of jobs, batches.

Names stand in subjects in base32, since they may have dots. An agent publishes only below its own
node, or below its owner and node, so that the bus' own permissions suffice.
"""

from __future__ import annotations

import base64
import functools
import re
import zlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from warpwatch_telemetry.jobs import JobId, shard_key

PARTITIONS = 64
RECORDS = "warpwatch.records"
NODES = "warpwatch.nodes"
REQUESTS = "warpwatch.node"
TENANTS = "warpwatch.tenant"
WORKERS = "warpwatch.worker"
# Replies, below the name of the requesting process: an agent may listen only to its own.
INBOX = "warpwatch.inbox"
# The publisher in a subject of an agent for all owners of its node.
OF_NODE = "node"
# A message has a megabyte at most.
MAX_MESSAGE_BYTES = 512 * 2**10
# The limit of a batch's unpacked size.
MAX_BATCH_BYTES = 4 * 2**20
STREAM = "WARPWATCH"

_TOKEN = re.compile(r"[A-Z2-7]{1,416}")


class Publisher(NamedTuple):
    """An agent: its node, and its only owner, None for a node's agent."""

    node: str
    owner: str | None = None

    @property
    def token(self) -> str:
        return OF_NODE if self.owner is None else token(self.owner)

    @property
    def requests(self) -> str:
        """The subject of requests to it."""
        if self.owner is None:
            return f"{REQUESTS}.{token(self.node)}"
        return f"{TENANTS}.{token(self.owner)}.{token(self.node)}"


def token(name: str) -> str:
    return base64.b32encode(name.encode(errors="replace")).decode().rstrip("=")


def name_of(text: str) -> str:
    """Return the name that a token stands for. Raises ValueError."""
    if not _TOKEN.fullmatch(text):
        raise ValueError("not base32")
    return base64.b32decode(text + "=" * (-len(text) % 8)).decode()


def partition_of(job: JobId) -> int:
    """Return the partition of a job, the same on all of its nodes and in all versions."""
    return shard_key(job) % PARTITIONS


def partition_of_node(node: str) -> int:
    return zlib.crc32(node.encode(errors="replace")) % PARTITIONS


def records_subject(partition: int, who: Publisher) -> str:
    return f"{RECORDS}.{partition}.{who.token}.{token(who.node)}"


def node_subject(who: Publisher) -> str:
    return f"{NODES}.{partition_of_node(who.node)}.{who.token}.{token(who.node)}"


# Each message is asked for its publisher.
@functools.lru_cache(maxsize=2**15)
def read_subject(subject: str) -> tuple[bool, int, Publisher]:
    """Return whether it is about the node itself, the partition, and the publisher.

    Raises ValueError.
    """
    _, kind, partition, owner, node = subject.split(".")
    who = Publisher(name_of(node), None if owner == OF_NODE else name_of(owner))
    number = int(partition)
    if kind == "nodes" and number != partition_of_node(who.node):
        raise ValueError("another partition than the node's")
    return kind == "nodes", number, who


class BatchId(NamedTuple):
    """A batch's name: the start of the agent, and its number since then."""

    boot: str
    number: int

    def __str__(self) -> str:
        return f"{self.boot}-{self.number}"


def read_batch_id(text: str) -> BatchId:
    """Return the batch's name. Raises ValueError."""
    boot, _, number = text.partition("-")
    return BatchId(boot[:64], int(number[:18]))


def pack(lines: bytes) -> bytes:
    packer = zlib.compressobj(level=1, wbits=31)
    return packer.compress(lines) + packer.flush()


def unpack(content: bytes) -> list[bytes]:
    """Return the lines of a batch. Raises ValueError."""
    return unpack_bytes(content, MAX_BATCH_BYTES).splitlines()


def unpack_bytes(content: bytes, limit_bytes: int) -> bytes:
    """Return what ``pack`` got. Raises ValueError if it is not gzip, or too much."""
    unpacker = zlib.decompressobj(wbits=31)
    try:
        unpacked = unpacker.decompress(content, limit_bytes)
    except zlib.error as error:
        raise ValueError(f"no gzip: {error}") from error
    if unpacker.unconsumed_tail or not unpacker.eof:
        raise ValueError(f"more than {limit_bytes} bytes, or not whole")
    return unpacked


def portions(lines: Iterable[bytes], limit_bytes: int) -> Iterator[bytes]:
    """Yield the lines in portions of at most so many bytes; a longer line is one of its own."""
    portion: list[bytes] = []
    size = 0
    for line in lines:
        if portion and size + len(line) > limit_bytes:
            yield b"".join(portion)
            portion, size = [], 0
        portion.append(line)
        size += len(line)
    if portion:
        yield b"".join(portion)
