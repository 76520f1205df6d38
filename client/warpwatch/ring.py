"""Writes the ring file of this process in place.

Training thread and helper thread both write records. The training thread never waits for the lock:
if it is taken, a record stays in ``_deferred`` until the next write.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Optional

from warpwatch import protocol
from warpwatch.rendezvous import Descriptor, take_lock

# As many as the ring holds: a thread that loses the GIL with the lock held keeps it for 5 ms.
_MAX_DEFERRED = protocol.RECORD_COUNT
# Where a step's words lie: as in protocol.STEP, then the ns of each phase. In the totals the place
# of the number holds how many steps there were, which is the number of the next one, too.
NUMBER, DURATION, GPU, ALLOCATED, SAMPLES, TOKENS, FIRST_PHASE = range(7)
# The words of protocol.WORK.
Work = tuple[int, int, int]
# A step to be written: its flags, the wall clock at its end in ns, its words, an iteration's work.
StepRow = tuple[int, int, list[int], Optional[Work]]


def ring_name(job: str, rank: int) -> str:
    """Return a name that cannot be guessed: 64 random bits."""
    return f"{re.sub(r'[^0-9A-Za-z_.-]', '_', job)[:40].lstrip('.')}-r{rank}-{os.urandom(8).hex()}"


# Maps whose file the program closed: a map holds a descriptor of its own, which may be another
# file by now and would be closed with the map.
_kept_maps: list[mmap.mmap] = []


class RingWriter:
    """The mapped file. ``words`` are its 64-bit words: storing one is a single aligned store.

    ``command_fd`` is the open command file or -1, ``command_seen`` the sequence number (8 bytes)
    of the newest command that the training thread has dealt with.
    """

    __slots__ = (
        "_command_file", "_deferred", "_file", "_lock", "_map", "_metadata", "_records", "_totals",
        "_view", "command_fd", "command_seen", "name", "words",
    )  # fmt: skip

    def __init__(self, fd: int, name: str) -> None:
        self._file = Descriptor(fd)
        self._command_file: Descriptor | None = None
        self.name = name
        self.command_fd = -1
        self.command_seen = bytes(8)
        self._map = mmap.mmap(fd, protocol.RING_SIZE)
        self._view = memoryview(self._map)
        self.words = self._view.cast("Q")
        self._lock = threading.Lock()
        self._deferred: deque[tuple[int, int, int, bytes]] = deque(maxlen=_MAX_DEFERRED)
        self._records = 0
        self._totals = 0
        self._metadata = 0

    def write_identity(self, identity: protocol.Identity) -> None:
        data = protocol.encode_identity(identity)
        self._map[: len(data)] = data

    def write_metadata(self, metadata: dict[str, Any]) -> None:
        """Write the metadata; helper thread only. Raises ProtocolError when it does not fit."""
        data = protocol.encode_metadata(self._metadata + 1, metadata)
        self._metadata += 1
        offset = protocol.META_OFFSETS[self._metadata % 2]
        self._map[offset : offset + len(data)] = data

    def beat(self, calls: int = 0) -> None:
        """Write the heartbeat, and the backwards and optimizer steps so far (``calls``)."""
        self.words[protocol.WORD_CALLS] = calls
        self.words[protocol.WORD_HEARTBEAT] = time.monotonic_ns()

    def append(self, kind: int, payload: bytes, flags: int = 0, wait_s: float = 0.0) -> None:
        """Write a record now, or leave it to the next write; without ``wait_s`` never wait.

        Payloads over RECORD_MAX_PAYLOAD are cut.
        """
        record = (kind, flags, time.time_ns(), payload[: protocol.RECORD_MAX_PAYLOAD])
        self._deferred.append(record)
        self.flush(wait_s)

    def event(self, event: str, wait_s: float = 0.0, **fields: Any) -> None:
        self.append(protocol.RECORD_EVENT, protocol.encode_event(event, fields), wait_s=wait_s)

    def flush(self, wait_s: float = 0.0) -> None:
        """Write the deferred records, unless another thread writes now."""
        lock = self._lock
        if lock.acquire(timeout=wait_s) if wait_s else lock.acquire(False):
            try:
                self._write_deferred()
            finally:
                lock.release()

    def write_steps(self, rows: Iterable[StepRow], totals: Sequence[int], phases: int) -> None:
        """Write records of steps with the first ``phases`` phases, and the totals after them."""
        pack = struct.Struct(f"{protocol.STEP.format}{phases}Q").pack
        end = FIRST_PHASE + phases
        for flags, wall_ns, words, work in rows:
            kind, payload = protocol.RECORD_STEP, pack(*words[:end])
            if work is not None:
                kind, size = protocol.RECORD_ITERATION, protocol.STEP.size
                payload = payload[:size] + protocol.WORK.pack(*work) + payload[size:]
            self._deferred.append((kind, flags, wall_ns, payload))
        self.flush()
        self._totals += 1
        offset = protocol.TOTALS_OFFSETS[self._totals % 2]
        steps, duration_ns, _, _, samples, tokens, *phases_ns = totals
        data = protocol.encode_totals(
            self._totals, steps, steps, samples, tokens, duration_ns, phases_ns
        )
        self._map[offset : offset + len(data)] = data

    def _write_deferred(self) -> None:
        deferred, ring, words = self._deferred, self._map, self.words
        while deferred:
            sequence = self._records + 1
            kind, flags, wall_ns, payload = deferred.popleft()
            data = protocol.encode_record(sequence, kind, flags, wall_ns, payload)
            offset = protocol.record_offset(sequence)
            ring[offset : offset + len(data)] = data
            words[protocol.WORD_RECORDS] = self._records = sequence

    def close(self) -> None:
        """Unmap and close the files that are still ours; this releases the lock."""
        intact = self.links() is not None
        for view in (self.words, self._view):
            view.release()
        if intact:
            self._map.close()
        else:
            _kept_maps.append(self._map)
        self._file.close()
        if self._command_file is not None:
            self._command_file.close()

    def links(self) -> int | None:
        """Return 0 if the file was removed, None if the program closed it."""
        return self._file.links()

    def open_commands(self, fd: int) -> None:
        """Read commands from ``fd`` from now on."""
        self._command_file = Descriptor(fd)
        self.command_fd = fd

    def lost_commands(self) -> Descriptor | None:
        """Return the command file, to be closed later, if it was removed or closed."""
        file = self._command_file
        if file is None or file.links():
            return None
        self._command_file = None
        self.command_fd = -1
        return file


def create(ranks_fd: int, name: str, metadata: dict[str, Any]) -> RingWriter:
    """Make ``<name>.ring`` in the open folder. Raises OSError; nothing is left behind then."""
    new = f"{name}.new"
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(new, flags, 0o644, dir_fd=ranks_fd)
    try:
        os.fchmod(fd, 0o644)
        # Allocated in full: a write into a hole of a full file system would kill the process.
        os.posix_fallocate(fd, 0, protocol.RING_SIZE)
        ring = RingWriter(fd, name)
        ring.write_identity(_identity())
        ring.write_metadata(metadata)
        ring.beat()
        if not take_lock(fd):
            raise OSError("the new ring is locked by another process")
        os.rename(new, f"{name}.ring", src_dir_fd=ranks_fd, dst_dir_fd=ranks_fd)
    except BaseException:
        os.close(fd)
        with suppress(OSError):
            os.unlink(new, dir_fd=ranks_fd)
        raise
    return ring


def _identity() -> protocol.Identity:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot_id = bytes.fromhex(file.read().strip().replace("-", ""))
    with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:
        # Field 22, start time in ticks since boot; the name in field 2 may hold spaces. proc(5).
        start = int(file.read().rpartition(")")[2].split()[19])
    return protocol.Identity(
        pid=os.getpid(),
        boot_id=boot_id,
        process_start=start,
        created_wall_ns=time.time_ns(),
        created_monotonic_ns=time.monotonic_ns(),
        record_count=protocol.RECORD_COUNT,
    )
