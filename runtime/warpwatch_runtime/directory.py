"""Opens folders, and files in them, that other users may change at any time.

A folder is reached from one of the daemon's own, name by name and never through a link. A file is
checked before it is opened: opening a device may have effects, and opening a pipe may wait.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Modes of folders that all users may write to, that only the daemon may write to, and that no other
# user may read.
STICKY = 0o1777
OWNED = 0o755
PRIVATE = 0o700

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Directory:
    """A folder as a path: ``base`` is the daemon's own, ``names`` lead on from there."""

    base: Path
    names: tuple[str, ...] = ()

    def __truediv__(self, name: str) -> Directory:
        return Directory(self.base, (*self.names, name))

    @property
    def path(self) -> Path:
        """The path for messages; opening it may find another file."""
        return self.base.joinpath(*self.names)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Open the folder. Raises OSError if one of the names is not a folder."""
        fd = os.open(self.base, FOLDER_FLAGS)
        try:
            for name in self.names:
                below = os.open(name, FOLDER_FLAGS, dir_fd=fd)
                os.close(fd)
                fd = below
            yield fd
        finally:
            os.close(fd)

    def unlink(self, name: str) -> bool:
        """Remove a file or link, and return whether that was done."""
        try:
            with self.opened() as fd:
                os.unlink(name, dir_fd=fd)
        except OSError:
            return False
        return True


def make(folder_fd: int, name: str, mode: int) -> None:
    """Make the daemon's folder ``name`` with this mode. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(name, 0o700, dir_fd=folder_fd)
    fd = os.open(name, FOLDER_FLAGS, dir_fd=folder_fd)
    try:
        found = os.fstat(fd)
        if found.st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, f"{name} belongs to uid {found.st_uid}")
        set_mode(fd, mode)
    finally:
        os.close(fd)


def make_parents(path: Path) -> None:
    """Make missing parents of the folder, readable by all users. Raises OSError."""
    for parent in reversed([one for one in path.parents if not one.exists()]):
        parent.mkdir(exist_ok=True)
        parent.chmod(OWNED)


def set_mode(fd: int, mode: int) -> None:
    """Set the mode of a folder if it differs. Raises OSError."""
    # Each chmod changes the folder, and changes mark a pod's folder as used.
    if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
        os.fchmod(fd, mode)


def open_checked(
    folder_fd: int, name: str, flags: int, check: Callable[[os.stat_result], None]
) -> int:
    """Open the very file that passed ``check``, without waiting.

    Raises OSError, and the errors of ``check``.
    """
    pinned = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        check(os.fstat(pinned))
        return os.open(f"/proc/self/fd/{pinned}", flags | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(pinned)


def open_own(folder_fd: int, name: str) -> int:
    """Open a file that the daemon writes, mode 0644, or make it. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(name, flags, 0o644, dir_fd=folder_fd)
    except FileExistsError:
        fd = open_checked(folder_fd, name, os.O_RDWR, check_regular)
    try:
        os.fchmod(fd, 0o644)
    except BaseException:
        os.close(fd)
        raise
    return fd


def check_regular(found: os.stat_result) -> None:
    """Raise FileExistsError unless it is a regular file."""
    if not stat.S_ISREG(found.st_mode):
        raise FileExistsError(errno.EEXIST, "not a regular file")
