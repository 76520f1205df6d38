"""The trace that libkineto writes into the inbox: when it is whole, and how it gets into the store.

It is plain JSON, written by the process itself; the JSON's end and a size that stands still say
that it is whole. Versions that rename it at the end and those that write in place look the same.
"""

from __future__ import annotations

import gzip
import os
import shutil
import stat
from pathlib import Path

from warpwatch_daemon import files
from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.directory import Directory

# The size must stand still for so long; less than what a report of one flush takes is a guess.
STILL_S = 0.3
_TAIL_BYTES = 64
# Level 1 is five times as quick as the default and 20 % larger.
_LEVEL = 1


class TraceFile:
    """One file that is waited for.

    ``look`` is for one thread; what it found, ``is_complete`` says to all. looked_at: when the
    newest look that has ended began, monotonic.
    """

    def __init__(self, folder: Path, name: str, owner_uid: int) -> None:
        self.name = name
        self._folder = folder
        self._owner_uid = owner_uid
        self._size = -1
        self._since = 0.0
        self.looked_at = 0.0
        self.is_complete = False

    def look(self, at: float) -> None:
        self.is_complete = self.is_complete or self._is_whole(at)
        self.looked_at = at

    def _is_whole(self, at: float) -> bool:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(self._folder / self.name, flags)
        except OSError:
            return False
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_uid != self._owner_uid:
                # Whose it is, ``take`` says.
                self._size = 0
                return True
            if found.st_size != self._size:
                self._size, self._since = found.st_size, at
                return False
            tail = os.pread(fd, _TAIL_BYTES, max(0, found.st_size - _TAIL_BYTES))
            return at - self._since >= STILL_S and tail.rstrip().endswith(b"}")
        finally:
            os.close(fd)

    def take(self, target: Path) -> None:
        """Into the store, compressed. Raises InboxError for a bad file, OSError for the store."""
        plain = target.with_name(target.name + ".plain")
        try:
            inbox.take(Directory(self._folder), self.name, self._owner_uid, plain)
            with (
                plain.open("rb") as source,
                files.replacing(target) as file,
                gzip.open(file, "wb", compresslevel=_LEVEL) as out,
            ):
                shutil.copyfileobj(source, out, 1 << 20)
        finally:
            plain.unlink(missing_ok=True)
