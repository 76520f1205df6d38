"""Where shims and daemon meet: the folders, and who holds a lock.

Only the daemon creates folders; a shim uses the first one whose ``daemon.lock`` is held by a
daemon that it may trust.
"""

from __future__ import annotations

import fcntl
import os
import stat
import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

LOCK_FILE = "daemon.lock"
RANKS = "ranks"
COMMANDS = "commands"
SYSTEM_DIR = "/run/warpwatch"
SYSTEM_INBOX = "/var/lib/warpwatch/inbox"

# struct flock of 64-bit Linux: type, whence, start, length, pid
_FLOCK = struct.Struct("hhqqi4x")


class Folder(NamedTuple):
    """A candidate folder. ``explicit``: named by WARPWATCH_DIR, so any owner's daemon will do."""

    path: str
    explicit: bool


def candidates(environ: Mapping[str, str], uid: int) -> list[Folder]:
    """The rendezvous folders in the order in which they are looked at."""
    named = environ.get("WARPWATCH_DIR")
    if named:
        return [Folder(named, True)]
    folders = [Folder(SYSTEM_DIR, False)]
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime:
        folders.append(Folder(os.path.join(runtime, "warpwatch"), False))
    folders.append(Folder(private_dir(uid), False))
    return folders


def private_dir(uid: int) -> str:
    """The last resort: a folder of the user's own, mode 0700."""
    return f"/tmp/warpwatch-{uid}"  # a fixed name by contract; ownership is checked


def inbox(folder: Folder, environ: Mapping[str, str], uid: int) -> str:
    """Where capture files go: traces are large and must never land in a memory file system."""
    named = environ.get("WARPWATCH_INBOX")
    if named:
        return named
    if folder.explicit:
        return SYSTEM_INBOX if os.path.isdir(SYSTEM_INBOX) else os.path.join(folder.path, "inbox")
    if folder.path == SYSTEM_DIR:
        return SYSTEM_INBOX
    return os.path.join(private_dir(uid), "inbox")


def lock_holder(fd: int) -> int | None:
    """Pid of the process that holds byte 0 of the open file, None if no one does.

    Works on read-only descriptors; a holder in another PID namespace has pid 0. Asked as a reader
    would: any process may take a reader's lock on a readable file, and that shall mean nothing.
    """
    asked = _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0)
    answer = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    return None if answer[0] == fcntl.F_UNLCK else answer[4]


def take_lock(fd: int) -> bool:
    """Lock byte 0 for as long as this process lives or closes any descriptor of the file."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    except OSError:
        return False
    return True


class Descriptor:
    """An open file as it was when it was opened."""

    __slots__ = ("_identity", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        status = os.fstat(fd)
        self._identity = (status.st_dev, status.st_ino)

    def links(self) -> int | None:
        """How many names the file has; None when the descriptor is not ours any more."""
        try:
            status = os.fstat(self.fd)
        except OSError:
            return None
        same = (status.st_dev, status.st_ino) == self._identity
        return status.st_nlink if same else None

    def close(self) -> None:
        """Close it if it is still ours."""
        if self.links() is not None:
            with suppress(OSError):
                os.close(self.fd)


class DaemonFolder:
    """It is open; ``fd`` is the folder's."""

    def __init__(self, candidate: Folder, fd: int) -> None:
        self.candidate = candidate
        self.fd = fd
        self._file = Descriptor(fd)
        self.owner_uid = os.fstat(fd).st_uid

    def close(self) -> None:
        self._file.close()


def find_daemon(environ: Mapping[str, str], uid: int) -> DaemonFolder | None:
    """The first candidate folder whose lock is held by a daemon of root, of this user, or named."""
    for folder in candidates(environ, uid):
        no_link = 0 if folder.explicit else os.O_NOFOLLOW
        try:
            fd = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | no_link)
        except OSError:
            continue
        trusted = (0, uid)
        if folder.explicit or os.fstat(fd).st_uid in trusted:
            holds = _daemon_holds(fd, None if folder.explicit else trusted)
            if holds:
                return DaemonFolder(folder, fd)
        os.close(fd)
    return None


def _daemon_holds(folder_fd: int, trusted: tuple[int, int] | None) -> bool:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(LOCK_FILE, flags, dir_fd=folder_fd)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or (trusted and status.st_uid not in trusted):
            return False
        return lock_holder(fd) is not None
    except OSError:
        # A file system without locks cannot say whether a daemon lives.
        return False
    finally:
        os.close(fd)
