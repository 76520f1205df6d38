"""Reads rings with ``pread``, and decides which files of ``ranks/`` are accepted as rings.

A file that shrinks is a short read, never a SIGBUS. Refused files are counted, with a reason.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import re
import stat
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from warpwatch import protocol, rendezvous
from warpwatch_daemon.ranks import claims
from warpwatch_runtime.directory import Directory, open_checked
from warpwatch_telemetry.jobs import Owner

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RingNews:
    """The content of a ring since the last read.

    lost: records overwritten or torn before. holder_pid: None if its process exited.
    """

    header: protocol.Header
    records: tuple[protocol.RecordHead, ...]
    lost: int
    holder_pid: int | None


class RingReader:
    """Reads one ring; ``position`` is the sequence number of the last record read.

    The descriptor is closed by ``close`` or with the reader.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._close = weakref.finalize(self, os.close, fd)
        self.position = 0
        self._seen: tuple[int | None, protocol.Header] | None = None

    def close(self) -> None:
        self._close()

    def header(self) -> protocol.Header:
        """Return the header. Raises ProtocolError if the file is no longer a ring."""
        size = os.fstat(self._fd).st_size
        return protocol.decode_header(os.pread(self._fd, protocol.HEADER_SIZE, 0), size)

    def holder_pid(self) -> int | None:
        """Return the PID of the ring's process: 0 in another PID namespace, None if it exited."""
        return rendezvous.lock_holder(self._fd)

    def step_begun(self) -> int | None:
        """Return the step that the process has begun now."""
        data = os.pread(self._fd, 8, 8 * protocol.WORD_STEP_BEGUN)
        begun = int.from_bytes(data, "little")
        return begun - 1 if begun else None

    def peek(self) -> int:
        """Read the header, and return how many records there are for ``read``."""
        # Asked before reading, so that all that a process wrote before its death is read.
        holder_pid = self.holder_pid()
        try:
            header = self.header()
        except protocol.ProtocolError:
            # ``read`` reads it again and raises this.
            self._seen = None
            return 0
        self._seen = (holder_pid, header)
        return min(max(0, header.records - self.position), header.identity.record_count)

    def read(self, limit: int) -> RingNews:
        """Return the ``limit`` newest records that ``peek`` saw; older ones count as lost."""
        holder_pid, header = self._seen or (self.holder_pid(), self.header())
        self._seen = None
        if header.records < self.position:
            raise protocol.ProtocolError("bad_header", "the record count went backwards")
        oldest = max(self.position, header.records - min(limit, header.identity.record_count))
        lost = oldest - self.position
        records: list[protocol.RecordHead] = []
        expected = oldest
        for data in self._chunks(oldest, header):
            for offset in range(0, len(data) - protocol.RECORD_SIZE + 1, protocol.RECORD_SIZE):
                expected += 1
                try:
                    record = protocol.decode_record(data[offset : offset + protocol.RECORD_SIZE])
                except protocol.ProtocolError:
                    continue
                if record.sequence == expected:
                    records.append(record)
        lost += header.records - oldest - len(records)
        self.position = header.records
        return RingNews(header, tuple(records), lost, holder_pid)

    def _chunks(self, oldest: int, header: protocol.Header) -> list[bytes]:
        """Return the bytes of the records after ``oldest``, in two pieces if the ring wraps."""
        count = header.identity.record_count
        wanted = header.records - oldest
        if not wanted:
            return []
        first = min(wanted, count - oldest % count)
        pieces = [(oldest + 1, first)]
        if wanted > first:
            pieces.append((oldest + 1 + first, wanted - first))
        return [
            os.pread(self._fd, n * protocol.RECORD_SIZE, protocol.record_offset(sequence, count))
            for sequence, n in pieces
        ]


MAX_RINGS_PER_OWNER = 64
# A half-made ring that is not finished after this time is counted as refused.
UNFINISHED_S = 60.0
# A folder with more files is an attack.
MAX_FILES = 20_000
# There can be 256 folders of pods.
MAX_FILES_PER_POD = 1_024
# Any user may write to the folder, and a scan is expensive.
SCAN_INTERVAL_S = 1.0
# Refusals that may end once another ring is closed.
TRANSIENT = frozenset({"too_many", "too_many_of_owner", "unreadable"})
# A ring whose command file cannot be made is tried again after this time.
POSTPONED_S = 30.0

# Inode, size and mode of a file.
_Identity = tuple[int, int, int]
_NAME = re.compile(r"[0-9A-Za-z._-]{1,96}-[0-9a-f]{16}\.ring")


@dataclass(frozen=True, slots=True, eq=False)
class OpenRing:
    """An accepted ring, equal to itself alone; its claims are not facts, the other fields are.

    owner_uid: the file's owner. pod_uid: the pod whose folder it lies in, None in the shared one.
    owner: of its job, ``ns/<namespace>`` from the kubelet, else ``uid/<owner_uid>``.
    """

    name: str
    reader: RingReader
    owner_uid: int
    owner: str
    created_time: float
    claims: claims.Claims
    pod_uid: str | None = None

    @property
    def payer(self) -> Owner:
        """The owner for quotas: a pod with a folder of its own, else the user of the file."""
        return self.owner_uid if self.pod_uid is None else self.pod_uid

    @property
    def budget(self) -> str:
        """The owner for counts of rings and records; a pod, if its namespace is unknown."""
        return _budget(self.owner, self.pod_uid)


class Limits(NamedTuple):
    """Limits of all folders together. scan_s: of one poll for new rings.

    A pod costs an open file, its lock. A kubelet runs 110 pods by default.
    """

    rings: int = 1024
    pods: int = 256
    scan_s: float = 0.05


LIMITS = Limits()


@dataclass(slots=True)
class RingCount:
    """Counts the open rings of all folders.

    budgets: the rings by ``OpenRing.budget``; freed: the number of closed rings.
    """

    limit: int = LIMITS.rings
    open: int = 0
    freed: int = 0
    budgets: Counter[str] = field(default_factory=Counter)

    def is_short(self, budget: str) -> bool:
        return self.open >= self.limit or self.budgets[budget] >= MAX_RINGS_PER_OWNER


@dataclass(slots=True)
class _Wait:
    """A file that is refused for now. counted: the reasons that were counted already."""

    until: float = -math.inf
    counted: set[str] = field(default_factory=set)


class RingTable:
    """The rings of one folder, that of the pod ``pod_uid`` or the shared one.

    ``reject`` gets the reason of every refusal, once for each file. ``count`` is of all folders.
    ``namespace``: the pod's, None if unknown; open rings keep theirs.
    """

    def __init__(
        self,
        folder: Directory,
        reject: Callable[[str], None],
        scan_interval_s: float = SCAN_INTERVAL_S,
        count: RingCount | None = None,
        pod_uid: str | None = None,
    ) -> None:
        self._folder = folder
        self._reject = reject
        self._interval_s = scan_interval_s
        self._count = count or RingCount()
        self._pod_uid = pod_uid
        self.namespace: str | None = None
        self.max_files = MAX_FILES if pod_uid is None else MAX_FILES_PER_POD
        self._refused: dict[str, _Identity] = {}
        # Refused for now; tried again after a ring was closed, or at a time.
        self._waiting: dict[str, _Wait] = {}
        self.open: dict[str, OpenRing] = {}
        self._scanned_at = -scan_interval_s
        self._scanned_mtime_ns = -1
        self._freed_seen = 0

    def scan(self, now: float, at: float) -> list[OpenRing]:
        """Return new rings since the last call; cheap while the folder has not changed.

        ``now`` is wall clock, ``at`` monotonic. Raises OSError if it is not a folder.
        """
        self._retry_waiting(at)
        with self._folder.opened() as fd:
            mtime_ns = os.fstat(fd).st_mtime_ns
            if at - self._scanned_at < self._interval_s or mtime_ns == self._scanned_mtime_ns:
                return []
            self._scanned_at = at
            # A file made within the clock's resolution of this scan is found at the next one.
            fresh = now - mtime_ns / 1e9 < 2
            self._scanned_mtime_ns = -1 if fresh else mtime_ns
            return self._take_new(fd, now)

    def _retry_waiting(self, at: float) -> None:
        has_room = self._freed_seen != self._count.freed
        self._freed_seen = self._count.freed
        for wait in self._waiting.values():
            if wait.until > -math.inf and (has_room or wait.until <= at):
                wait.until = -math.inf
                self.rescan()

    def _take_new(self, folder_fd: int, now: float) -> list[OpenRing]:
        with os.scandir(folder_fd) as entries:
            seen = list(itertools.islice(entries, self.max_files + 1))
        if len(seen) > self.max_files:
            self._reject("too_many_files")
        names = {entry.name for entry in seen}
        self._refused = {name: known for name, known in self._refused.items() if name in names}
        self._waiting = {name: wait for name, wait in self._waiting.items() if name in names}
        new = (self._consider(folder_fd, one, now) for one in seen if one.name not in self.open)
        return [ring for ring in new if ring is not None]

    def rescan(self) -> None:
        """Scan at the next call even if the folder has not changed."""
        self._scanned_mtime_ns = -1

    def forget(self, ring: OpenRing, *, remove: bool) -> None:
        """Close a ring; ``remove`` also deletes its file."""
        if self.open.pop(ring.name, None) is None:
            return
        self._count.budgets[ring.budget] -= 1
        self._count.open -= 1
        self._count.freed += 1
        ring.reader.close()
        self.rescan()
        if remove:
            self._folder.unlink(ring.name)

    def refuse(self, ring: OpenRing, error: protocol.ProtocolError) -> None:
        """Refuse an accepted ring that turned out to be broken."""
        try:
            with self._folder.opened() as fd:
                identity = _identity(os.stat(ring.name, dir_fd=fd, follow_symlinks=False))
        except OSError:
            identity = (0, 0, 0)
        self._note(ring.name, identity, error)
        self.forget(ring, remove=False)

    def postpone(self, ring: OpenRing, reason: str, error: Exception, at: float) -> None:
        """Close an accepted ring that cannot be used yet, and try it again later."""
        self.forget(ring, remove=False)
        self._freed_seen = self._count.freed
        if self._is_new(ring.name, reason, at + POSTPONED_S):
            self._reject(reason)
            logger.warning("%s waits: %s: %s", ring.name, reason, error)

    def _consider(self, folder_fd: int, entry: os.DirEntry[str], now: float) -> OpenRing | None:
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:
            return None
        identity = _identity(found)
        wait = self._waiting.get(entry.name)
        if self._refused.get(entry.name) == identity or (wait and wait.until > -math.inf):
            return None
        try:
            ring = self._open_ring(folder_fd, entry.name, found)
            self.open[ring.name] = ring
            self._count.budgets[ring.budget] += 1
            self._count.open += 1
            return ring
        except protocol.ProtocolError as error:
            if error.reason == "unfinished" and now - found.st_mtime < UNFINISHED_S:
                self.rescan()
                return None
            self._note(entry.name, identity, error)
        except OSError as error:
            self._note(entry.name, identity, protocol.ProtocolError("unreadable", str(error)))
        return None

    def _open_ring(self, folder_fd: int, name: str, found: os.stat_result) -> OpenRing:
        _check_kind(name, found)
        self._check_room(found.st_uid)
        fd = open_checked(folder_fd, name, os.O_RDONLY, lambda now: _check_kind(name, now))
        reader = RingReader(fd)
        try:
            uid = os.fstat(fd).st_uid
            header = reader.header()
            said = claims.parse(header.metadata_text, self._pod_uid)
        except BaseException:
            reader.close()
            raise
        created_time = header.identity.created_wall_ns / 1e9
        return OpenRing(name, reader, uid, self._owner(uid), created_time, said, self._pod_uid)

    def _owner(self, uid: int) -> str:
        return f"uid/{uid}" if self.namespace is None else f"ns/{self.namespace}"

    def _check_room(self, owner_uid: int) -> None:
        if self._count.open >= self._count.limit:
            raise protocol.ProtocolError("too_many", f"{self._count.limit} rings are open already")
        owner = self._owner(owner_uid)
        if self._count.is_short(_budget(owner, self._pod_uid)):
            raise protocol.ProtocolError(
                "too_many_of_owner", f"{owner} has {MAX_RINGS_PER_OWNER} rings already"
            )

    def _note(self, name: str, identity: _Identity, error: protocol.ProtocolError) -> None:
        if error.reason not in TRANSIENT:
            self._refused[name] = identity
        elif not self._is_new(name, error.reason, math.inf):
            return
        self._reject(error.reason)
        logger.warning("refused %.120r: %s: %s", name, error.reason, error)

    def _is_new(self, name: str, reason: str, until: float) -> bool:
        """Let the file wait; whether it does so for this reason for the first time."""
        wait = self._waiting.setdefault(name, _Wait())
        wait.until = until
        is_new = reason not in wait.counted
        wait.counted.add(reason)
        return is_new


def _budget(owner: str, pod_uid: str | None) -> str:
    return owner if pod_uid is None or owner.startswith("ns/") else pod_uid


def _identity(found: os.stat_result) -> _Identity:
    return (found.st_ino, found.st_size, found.st_mode)


def _check_kind(name: str, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise protocol.ProtocolError("symlink", "links are not followed")
    if not stat.S_ISREG(found.st_mode):
        raise protocol.ProtocolError("not_regular", "only regular files are read")
    if name.endswith(".new"):
        raise protocol.ProtocolError("unfinished", "the ring was never finished")
    if not _NAME.fullmatch(name):
        raise protocol.ProtocolError("bad_name", "the name is not a ring's")
    if found.st_size > protocol.MAX_RING_BYTES or found.st_size < protocol.HEADER_SIZE:
        raise protocol.ProtocolError("wrong_size", f"{found.st_size} bytes are not a ring")
