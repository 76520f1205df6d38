"""Which files of ``ranks/`` are accepted as rings. What is refused is counted, with a reason."""

from __future__ import annotations

import itertools
import logging
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from warpwatch.client import protocol
from warpwatch.daemon.rendezvous import claims
from warpwatch.daemon.rendezvous.ring import RingReader

logger = logging.getLogger(__name__)

MAX_RINGS = 1024
MAX_RINGS_PER_OWNER = 64
# A half-made ring that nobody finished after this time is counted as refused.
UNFINISHED_S = 60.0
# Files that are looked at; a folder with more of them is somebody's attack.
MAX_FILES = 20_000
# The folder is anybody's to write: a look at it costs, so it is not looked at more often.
SCAN_INTERVAL_S = 1.0
# Refusals that may be over once another ring is gone.
TRANSIENT = frozenset({"too_many", "too_many_of_owner", "unreadable"})

_NAME = re.compile(r"[0-9A-Za-z._-]{1,96}-[0-9a-f]{16}\.ring")


@dataclass(frozen=True, slots=True)
class OpenRing:
    """An accepted ring. ``owner_uid`` is the file's owner: a fact, where the claims are not."""

    name: str
    reader: RingReader
    owner_uid: int
    created_time: float
    claims: claims.Claims


class RingTable:
    """``reject`` is told the reason of every refusal, once a file."""

    def __init__(
        self,
        folder: Path,
        reject: Callable[[str], None],
        scan_interval_s: float = SCAN_INTERVAL_S,
    ) -> None:
        self._folder = folder
        self._reject = reject
        self._interval_s = scan_interval_s
        self._refused: dict[str, tuple[int, int, int]] = {}
        # Refused for now: counted, and tried again when a ring has gone.
        self._waiting: set[str] = set()
        self._owners: Counter[int] = Counter()
        self._open: dict[str, OpenRing] = {}
        self._scanned_at = -scan_interval_s
        self._scanned_mtime_ns = -1

    def scan(self) -> list[OpenRing]:
        """Rings that are new since the last call. Cheap while the folder has not changed."""
        now = time.monotonic()
        mtime_ns = os.stat(self._folder).st_mtime_ns
        if now - self._scanned_at < self._interval_s or mtime_ns == self._scanned_mtime_ns:
            return []
        self._scanned_at = now
        # A file that comes within the clock's grain of this look is found at the next one.
        fresh = time.time_ns() - mtime_ns < 2_000_000_000
        self._scanned_mtime_ns = -1 if fresh else mtime_ns
        with os.scandir(self._folder) as entries:
            seen = list(itertools.islice(entries, MAX_FILES + 1))
        if len(seen) > MAX_FILES:
            self._reject("too_many_files")
        names = {entry.name for entry in seen}
        self._refused = {name: known for name, known in self._refused.items() if name in names}
        self._waiting &= names
        fresh_rings = (self._consider(entry) for entry in seen if entry.name not in self._open)
        return [ring for ring in fresh_rings if ring is not None]

    def rescan(self) -> None:
        """Look again at the next call, whether the folder has changed or not."""
        self._scanned_mtime_ns = -1

    def forget(self, ring: OpenRing, *, remove: bool) -> None:
        """Close a ring; ``remove`` also deletes its file."""
        if self._open.pop(ring.name, None) is None:
            return
        self._owners[ring.owner_uid] -= 1
        ring.reader.close()
        self._waiting.clear()
        self.rescan()
        if remove:
            (self._folder / ring.name).unlink(missing_ok=True)

    def refuse(self, ring: OpenRing, error: protocol.ProtocolError) -> None:
        """An accepted ring turned out to be broken: it is not looked at again."""
        try:
            identity = _identity(os.lstat(self._folder / ring.name))
        except OSError:
            identity = (0, 0, 0)
        self._note(ring.name, identity, error)
        self.forget(ring, remove=False)

    def _consider(self, entry: os.DirEntry[str]) -> OpenRing | None:
        try:
            found = entry.stat(follow_symlinks=False)
        except OSError:
            return None
        identity = _identity(found)
        if self._refused.get(entry.name) == identity or entry.name in self._waiting:
            return None
        try:
            ring = self._open_ring(entry.name, found)
            self._open[ring.name] = ring
            self._owners[ring.owner_uid] += 1
            return ring
        except protocol.ProtocolError as error:
            if error.reason == "unfinished" and time.time() - found.st_mtime < UNFINISHED_S:
                self.rescan()
                return None
            self._note(entry.name, identity, error)
        except OSError as error:
            self._note(entry.name, identity, protocol.ProtocolError("unreadable", str(error)))
        return None

    def _open_ring(self, name: str, found: os.stat_result) -> OpenRing:
        _check_kind(name, found)
        if len(self._open) >= MAX_RINGS:
            raise protocol.ProtocolError("too_many", f"{MAX_RINGS} rings are open already")
        if self._owners[found.st_uid] >= MAX_RINGS_PER_OWNER:
            raise protocol.ProtocolError(
                "too_many_of_owner", f"uid {found.st_uid} has {MAX_RINGS_PER_OWNER} rings already"
            )
        # O_NONBLOCK: a FIFO that took the file's place since the look must not hold us.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(self._folder / name, flags)
        try:
            opened = os.fstat(fd)
            _check_kind(name, opened)
            reader = RingReader(fd)
            header = reader.header()
            said = claims.parse(header.metadata_text)
        except BaseException:
            os.close(fd)
            raise
        created_time = header.identity.created_wall_ns / 1e9
        return OpenRing(name, reader, opened.st_uid, created_time, said)

    def _note(
        self, name: str, identity: tuple[int, int, int], error: protocol.ProtocolError
    ) -> None:
        if error.reason in TRANSIENT:
            self._waiting.add(name)
        else:
            self._refused[name] = identity
        self._reject(error.reason)
        logger.warning("refused %s: %s: %s", name[:120], error.reason, error)


def _identity(found: os.stat_result) -> tuple[int, int, int]:
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
        raise protocol.ProtocolError("wrong_size", f"{found.st_size} bytes are no ring")
