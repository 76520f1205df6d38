"""Copies files of captures out of the inbox, from the opened file, then removes them.

All users may write to the inbox, so none of its content is trusted.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from warpwatch_capturing.participant import FetchError
from warpwatch_daemon.ranks.table import MAX_FILES
from warpwatch_runtime import files
from warpwatch_runtime.directory import FOLDER_FLAGS, Directory, open_checked

# The end of a file's name, by the kind of capture.
SUFFIX = {"torch": ".pt.trace.json.gz", "stacks": ".stacks.json", "memory": ".memory.json"}
# The end of the name of a second file.
MORE_SUFFIX = {"memory": ".memory.pickle"}
MAX_FILE_BYTES = 8 << 30
# A file must leave this much of the store's file system free.
MIN_FREE_BYTES = 200 << 20
# The time limit of a sweep for folders, which nobody needs there.
SWEEP_FOLDERS_S = 2.0

# The prefix of folders that are being removed.
SWEPT = "swept."


def copy_out(inbox: Directory, name: str, owner_uid: int, target: Path) -> int:
    """Copy the file ``name`` of ``owner_uid`` to ``target``, remove it and return its bytes.

    Raises FetchError unless it is a regular file of that owner without holes, OSError if the store
    is full.
    """
    try:
        with inbox.opened() as folder_fd:
            check = partial(_check, name, owner_uid)
            fd = open_checked(folder_fd, name, os.O_RDONLY, check)
    except OSError as error:
        raise FetchError(f"{name}: {error.strerror}") from error
    try:
        size = _size(fd, name)
        if shutil.disk_usage(target.parent).free < size + MIN_FREE_BYTES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        _copy(fd, target, size)
    finally:
        os.close(fd)
    inbox.unlink(name)
    return size


def _check(name: str, owner_uid: int, found: os.stat_result) -> None:
    """Raise FetchError unless it is a regular file of the owner with one name."""
    if not stat.S_ISREG(found.st_mode):
        raise FetchError(f"{name} is not a regular file")
    if found.st_nlink != 1:
        # A hard link to another's file would make the daemon publish it.
        raise FetchError(f"{name} has {found.st_nlink} links")
    if found.st_uid != owner_uid:
        raise FetchError(f"{name} belongs to uid {found.st_uid}, not {owner_uid}")


def _size(fd: int, name: str) -> int:
    """Return the size in bytes of a file without holes. Raises FetchError."""
    size = os.fstat(fd).st_size
    if size > MAX_FILE_BYTES:
        raise FetchError(f"{name} has {size} bytes, at most {MAX_FILE_BYTES}")
    # Holes cost their maker nothing and would fill the store. Fewer blocks than bytes prove none:
    # file systems compress.
    if size and os.lseek(fd, 0, os.SEEK_HOLE) < size:
        raise FetchError(f"{name} has holes")
    os.lseek(fd, 0, os.SEEK_SET)
    return size


def _copy(source_fd: int, target: Path, size: int) -> None:
    """Copy exactly ``size`` bytes, even if the file grows meanwhile."""
    with files.replacing(target) as out, os.fdopen(os.dup(source_fd), "rb") as source:
        remaining = size
        while remaining and (data := source.read(min(1 << 20, remaining))):
            out.write(data)
            remaining -= len(data)
        if remaining:
            raise FetchError(f"{target.name}: the file became shorter while it was read")


def sweep(
    inbox: Directory,
    older_than_s: float,
    now: float,
    limit_s: float | None = None,
    keep: str = "",
    monotonic: Callable[[], float] = time.monotonic,
) -> int:
    """Remove uncollected files and folders, except ``keep``; return their number.

    The rest stays until the next sweep if removing fails or ``limit_s`` is over. Without a limit
    only folders have one, SWEEP_FOLDERS_S.
    """
    until = None if limit_s is None else monotonic() + limit_s
    with inbox.opened() as inbox_fd:
        removed = 0
        folders: list[str] = []
        for name in _old(inbox_fd, older_than_s, now, until, monotonic):
            if name != keep:
                with contextlib.suppress(OSError):
                    if _is_unlinked(inbox_fd, name):
                        removed += 1
                    else:
                        folders.append(name)
        until = monotonic() + SWEEP_FOLDERS_S if until is None else until
        return removed + _remove_folders(inbox_fd, folders, until, monotonic)


def _old(
    inbox_fd: int,
    older_than_s: float,
    now: float,
    until: float | None,
    monotonic: Callable[[], float],
) -> Iterator[str]:
    """Yield entries that did not change for this time, or lie as far ahead after a clock change.

    ``now`` is wall clock, ``until`` monotonic.
    """
    with os.scandir(inbox_fd) as entries:
        for entry in entries:
            if until is not None and monotonic() >= until:
                return
            with contextlib.suppress(OSError):
                # Users can set the time of the content, not this one.
                age_s = now - entry.stat(follow_symlinks=False).st_ctime
                if abs(age_s) >= older_than_s:
                    yield entry.name


def _is_unlinked(folder_fd: int, name: str) -> bool:
    """Remove a file; return False for a folder, which stays. Raises OSError."""
    try:
        os.unlink(name, dir_fd=folder_fd)
    except IsADirectoryError:
        return False
    return True


def evict(
    inbox: Directory,
    owner_uid: int | None,
    surplus_bytes: int,
    surplus_files: int,
    keep: str,
    limit_s: float,
    monotonic: Callable[[], float] = time.monotonic,
) -> None:
    """Remove folders, which nobody needs there, and the oldest files until the surplus is removed.

    ``owner_uid``: the user of the files; None: all users. ``keep`` stays. Raises OSError.
    """
    until = monotonic() + limit_s
    with inbox.opened() as inbox_fd:
        files, folders = _of_owner(inbox_fd, owner_uid, keep)
        _remove_folders(inbox_fd, folders, until, monotonic)
        for found, name in files:
            if (surplus_bytes <= 0 and surplus_files <= 0) or monotonic() >= until:
                return
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=inbox_fd)
                surplus_bytes -= found.st_blocks * 512
                surplus_files -= 1


def _of_owner(
    inbox_fd: int, owner_uid: int | None, keep: str
) -> tuple[list[tuple[os.stat_result, str]], list[str]]:
    """Return files with their names, the oldest first, and the names of folders."""
    files, folders = [], []
    with os.scandir(inbox_fd) as entries:
        for entry in itertools.islice(entries, MAX_FILES):
            with contextlib.suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if owner_uid not in (None, found.st_uid) or entry.name == keep:
                    continue
                if stat.S_ISDIR(found.st_mode):
                    folders.append(entry.name)
                else:
                    files.append((found, entry.name))
    return sorted(files, key=lambda file: file[0].st_ctime), folders


def remove_swept(
    base: Directory, limit_s: float, monotonic: Callable[[], float] = time.monotonic
) -> None:
    """Remove folders with the prefix SWEPT within the time limit."""
    until = monotonic() + limit_s
    with base.opened() as base_fd:
        with os.scandir(base_fd) as entries:
            folders = [entry.name for entry in entries if entry.name.startswith(SWEPT)]
        _remove_folders(base_fd, folders, until, monotonic)


def _remove_folders(
    inbox_fd: int, folders: list[str], until: float, monotonic: Callable[[], float]
) -> int:
    removed = 0
    while folders and monotonic() < until:
        name = folders.pop()
        with contextlib.suppress(OSError):
            folders += _emptied(inbox_fd, name, until, monotonic)
            os.rmdir(name, dir_fd=inbox_fd)
            removed += 1
    return removed


def _emptied(inbox_fd: int, name: str, until: float, monotonic: Callable[[], float]) -> list[str]:
    """Remove the folder's files and move its folders into the inbox, so that no depth matters.

    Return the names of moved folders. ``until`` is monotonic. Raises OSError.
    """
    lifted: list[str] = []
    folder_fd = os.open(name, FOLDER_FLAGS, dir_fd=inbox_fd)
    try:
        with os.scandir(folder_fd) as entries:
            for entry in itertools.takewhile(lambda _: monotonic() < until, entries):
                with contextlib.suppress(OSError):
                    if not _is_unlinked(folder_fd, entry.name):
                        new = f"{SWEPT}{secrets.token_hex(8)}"
                        os.rename(entry.name, new, src_dir_fd=folder_fd, dst_dir_fd=inbox_fd)
                        lifted.append(new)
    finally:
        os.close(folder_fd)
    return lifted
