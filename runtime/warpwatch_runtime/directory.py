"""Folders that others may change under the daemon's hands, and the files in them.

A folder is reached from one of the daemon's own, name by name and never through a link. A file is
looked at before it is opened: opening a device does something, and opening a pipe may wait.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Modes of folders that everyone may write to, of those that are the daemon's alone, and of those
# that no one else may even look into.
STICKY = 0o1777
OWNED = 0o755
PRIVATE = 0o700

FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class Directory:
    """A folder by the way to it: ``base`` is the daemon's own, ``names`` are reached from there."""

    base: Path
    names: tuple[str, ...] = ()

    def __truediv__(self, name: str) -> Directory:
        return Directory(self.base, (*self.names, name))

    @property
    def path(self) -> Path:
        """For messages; what lies there when it is opened by this path is not known."""
        return self.base.joinpath(*self.names)

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """The folder's descriptor. Raises OSError where one of the names is no folder."""
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
        """Remove a file or link; False where there is none, or something else has its name."""
        try:
            with self.opened() as fd:
                os.unlink(name, dir_fd=fd)
        except OSError:
            return False
        return True


def make(folder_fd: int, name: str, mode: int) -> None:
    """The daemon's folder ``name`` with this mode. Raises OSError where it can be none."""
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
    """What is missing above the folder, open to everybody whatever the umask. Raises OSError."""
    for parent in reversed([one for one in path.parents if not one.exists()]):
        parent.mkdir(exist_ok=True)
        parent.chmod(OWNED)


def set_mode(fd: int, mode: int) -> None:
    """Give it to the folder, unless it has it. Raises OSError."""
    # Each chmod is a change of the folder, and by its changes a pod's folder is known as used.
    if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
        os.fchmod(fd, mode)


def open_checked(
    folder_fd: int, name: str, flags: int, check: Callable[[os.stat_result], None]
) -> int:
    """Open what ``check`` has seen and not raised for, and nothing that took its place since.

    It never waits. Raises OSError, and what ``check`` raises.
    """
    pinned = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder_fd)
    try:
        check(os.fstat(pinned))
        return os.open(f"/proc/self/fd/{pinned}", flags | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(pinned)


def open_own(folder_fd: int, name: str) -> int:
    """A file that the daemon writes, mode 0644; made where it is missing. Raises OSError."""
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
    """Raises FileExistsError for anything but a regular file."""
    if not stat.S_ISREG(found.st_mode):
        raise FileExistsError(errno.EEXIST, "what has the name is no regular file")
