"""A process that floods rings: `python -m tests.daemon.ranks.flooding UID KIND RING...`.

KIND ``records``: whole rings of valid steps, new ones faster than the daemon looks.
KIND ``counts``: nothing but the number of records, raised by a ring's size each time.
It owns the rings, holds their locks and is another user from the beginning, where it may be.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import sys
import time

from warpwatch import protocol

ROUND_S = 0.2
# Made beforehand, so that the attack costs the machine little: 20 s of it.
PREPARED = 100


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
    prepared = [whole_ring(turn) for turn in range(PREPARED)] if kind == "records" else []
    rings = [Flooded(path, uid) for path in paths]
    if os.getuid() == 0:
        os.setuid(uid)
    print("flooding", flush=True)
    for turn in itertools.count():
        for ring in rings:
            if kind == "counts":
                ring.raise_count()
            elif turn < PREPARED:
                ring.fill(prepared[turn])
        time.sleep(ROUND_S)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
