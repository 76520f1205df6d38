"""Taking over what a process wrote for a capture: copied from the opened file, then removed."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from warpwatch.daemon.errors import WarpwatchError

# What a kind of capture brings, by the end of its name.
SUFFIX = {"torch": ".pt.trace.json.gz", "stacks": ".stacks.json"}
MAX_FILE_BYTES = 8 << 30


class InboxError(WarpwatchError):
    """The file cannot be taken over; the text says why."""


def take(inbox: Path, name: str, owner_uid: int, target: Path) -> int:
    """Copy the file ``name`` of ``owner_uid`` to ``target`` and remove it; its size in bytes.

    Raises InboxError when it is no regular file of that owner, OSError when the store is full.
    """
    path = inbox / name
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise InboxError(f"{name}: {error.strerror}") from error
    with os.fdopen(fd, "rb") as source:
        found = os.fstat(source.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise InboxError(f"{name} is no regular file")
        if found.st_nlink != 1:
            # A hard link to somebody's file would make the daemon publish it.
            raise InboxError(f"{name} has {found.st_nlink} links")
        if found.st_uid != owner_uid:
            raise InboxError(f"{name} belongs to uid {found.st_uid}, not {owner_uid}")
        if found.st_size > MAX_FILE_BYTES:
            raise InboxError(f"{name} has {found.st_size} bytes, at most {MAX_FILE_BYTES}")
        _copy(source.fileno(), target, found.st_size)
    path.unlink(missing_ok=True)
    return found.st_size


def _copy(source_fd: int, target: Path, size: int) -> None:
    """Exactly ``size`` bytes: a file that grows while it is read is cut there."""
    part = target.with_name(target.name + ".part")
    try:
        with part.open("wb") as out, os.fdopen(os.dup(source_fd), "rb") as source:
            remaining = size
            while remaining and (data := source.read(min(1 << 20, remaining))):
                out.write(data)
                remaining -= len(data)
        if remaining:
            raise InboxError(f"{target.name}: the file became shorter while it was read")
        part.rename(target)
    finally:
        part.unlink(missing_ok=True)


def sweep(inbox: Path, older_than_s: float, now: float) -> int:
    """Remove what nobody collected; the number of files removed."""
    removed = 0
    with os.scandir(inbox) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            if now - found.st_mtime < older_than_s:
                continue
            if stat.S_ISDIR(found.st_mode):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                Path(entry.path).unlink(missing_ok=True)
            removed += 1
    return removed
