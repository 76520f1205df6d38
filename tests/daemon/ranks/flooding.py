"""Rings that another user floods: `python -m tests.daemon.ranks.flooding UID KIND RING...`.

KIND ``records``: whole rings of valid steps, new ones faster than the daemon looks.
KIND ``counts``: nothing but the number of records, raised by a ring's size each time.
It owns the rings, holds their locks and is another user from the beginning, where it may be.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tests.daemon.ranks.ring_files import RingFile
from tests.loop.node import ROOT, LoopNode
from warpwatch import protocol

ROUND_S = 0.2


@contextmanager
def flood(node: LoopNode, uid: int, kind: str, count: int) -> Iterator[None]:
    """``count`` rings that another user floods, of a job of that user's own."""
    made = node.folder / f"made-{kind}"
    made.mkdir()
    rings = [RingFile(made, job=f"flood-{kind}", rank=n, world_size=count) for n in range(count)]
    arguments = [str(uid), kind, *(str(ring.path) for ring in rings)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.daemon.ranks.flooding", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"flooding\n"
        for ring in rings:
            # Only now, when they are locked: without a process they would be those of the dead.
            ring.path.rename(node.run_dir / "ranks" / ring.path.name)
        yield
    finally:
        process.kill()
        process.communicate()


class Flooded:
    def __init__(self, path: str, uid: int) -> None:
        fd = os.open(path, os.O_RDWR)
        if os.getuid() == 0:
            os.fchown(fd, uid, uid)
        fcntl.lockf(fd, fcntl.LOCK_EX, 1, 0)
        self._map = mmap.mmap(fd, protocol.RING_SIZE)
        self.records = 0

    def _word(self, index: int, value: int) -> None:
        self._map[8 * index : 8 * index + 8] = value.to_bytes(8, "little")

    def raise_count(self) -> None:
        self.records += protocol.RECORD_COUNT
        self._word(protocol.WORD_HEARTBEAT, time.monotonic_ns())
        self._word(protocol.WORD_RECORDS, self.records)

    def fill(self, records: bytes) -> None:
        self._map[protocol.HEADER_SIZE :] = records
        self.raise_count()


def whole_ring(turn: int) -> bytes:
    """The valid steps that fill a ring for the ``turn``-th time."""
    first = turn * protocol.RECORD_COUNT
    return b"".join(_step(first + n) for n in range(1, protocol.RECORD_COUNT + 1))


def _step(sequence: int) -> bytes:
    payload = protocol.STEP.pack(sequence, 10**8, 10**7, 1 << 30, 8, 8) + (10**7).to_bytes(8, "big")
    record = protocol.encode_record(sequence, protocol.RECORD_STEP, 0, time.time_ns(), payload)
    return record.ljust(protocol.RECORD_SIZE, b"\0")


def main(uid: int, kind: str, paths: list[str]) -> None:
    rings = [Flooded(path, uid) for path in paths]
    if os.getuid() == 0:
        os.setuid(uid)
    print("flooding", flush=True)
    for turn in itertools.count():
        records = whole_ring(turn) if kind == "records" else b""
        for ring in rings:
            if records:
                ring.fill(records)
            else:
                ring.raise_count()
        time.sleep(ROUND_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
