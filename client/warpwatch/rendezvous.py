"""Finds the folders in which shims and daemon meet, and writes capture files into the inbox.

Only the daemon creates folders; a shim uses the first one whose ``daemon.lock`` is held by a
daemon that it may trust.
"""

from __future__ import annotations

import gzip
import os
import stat
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

with suppress(ImportError):
    # Windows lacks it; the shim is imported there, and does nothing.
    import fcntl

LOCK_FILE = "daemon.lock"
RANKS = "ranks"
COMMANDS = "commands"
SYSTEM_DIR = "/run/warpwatch"
SYSTEM_INBOX = "/var/lib/warpwatch/inbox"

# struct flock of 64-bit Linux: type, whence, start, length, pid
_FLOCK = struct.Struct("hhqqi4x")


class Folder(NamedTuple):
    """A candidate folder; an ``explicit`` one (WARPWATCH_DIR) may belong to any owner."""

    path: str
    explicit: bool


def candidates(environ: Mapping[str, str], uid: int) -> list[Folder]:
    """Return the rendezvous folders in the order of the search."""
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
    """Return the last candidate: a folder of the user's own, mode 0700."""
    return f"/tmp/warpwatch-{uid}"  # a fixed name by contract; ownership is checked


def inbox(folder: Folder, environ: Mapping[str, str], uid: int) -> str:
    """Return the folder of capture files, never in memory: traces are large."""
    named = environ.get("WARPWATCH_INBOX")
    if named:
        return named
    if folder.explicit:
        return SYSTEM_INBOX if os.path.isdir(SYSTEM_INBOX) else os.path.join(folder.path, "inbox")
    if folder.path == SYSTEM_DIR:
        return SYSTEM_INBOX
    return os.path.join(private_dir(uid), "inbox")


def lock_holder(fd: int) -> int | None:
    """Return the PID of the process that holds byte 0 of the open file, or None.

    Works on read-only descriptors; a holder in another PID namespace has PID 0. Read locks are
    ignored, since any process may take one on a readable file.
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
    """An open file that the program may close: programs that become daemons close all descriptors.

    The number may then belong to another file, so it is compared with the file that was opened.
    """

    __slots__ = ("_identity", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        status = os.fstat(fd)
        self._identity = (status.st_dev, status.st_ino)

    def links(self) -> int | None:
        """Return the number of names of the file; None if the descriptor is not ours any more."""
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


class DaemonFolder(Descriptor):
    """The open rendezvous folder of a daemon that this process trusts."""

    __slots__ = ("candidate", "owner_uid")

    def __init__(self, candidate: Folder, fd: int) -> None:
        super().__init__(fd)
        self.candidate = candidate
        self.owner_uid = os.fstat(fd).st_uid


def find_daemon(environ: Mapping[str, str], uid: int) -> DaemonFolder | None:
    """Return the first candidate folder whose lock a trusted daemon holds: root's or this user's.

    In a folder named by WARPWATCH_DIR any daemon is trusted.
    """
    for folder in candidates(environ, uid):
        no_link = 0 if folder.explicit else os.O_NOFOLLOW
        try:
            fd = os.open(folder.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | no_link)
        except OSError:
            continue
        trusted = None if folder.explicit else (0, uid)
        if _is_of(os.fstat(fd), trusted) and _daemon_holds(fd, trusted):
            return DaemonFolder(folder, fd)
        os.close(fd)
    return None


def _is_of(status: os.stat_result, trusted: tuple[int, int] | None) -> bool:
    return trusted is None or status.st_uid in trusted


def _daemon_holds(folder_fd: int, trusted: tuple[int, int] | None) -> bool:
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(LOCK_FILE, flags, dir_fd=folder_fd)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        is_lock = stat.S_ISREG(status.st_mode) and _is_of(status, trusted)
        return is_lock and lock_holder(fd) is not None
    except OSError:
        # On a file system without locks it is unknown whether a daemon lives.
        return False
    finally:
        os.close(fd)


# The expected size of a capture, until a capture of this process was larger.
ESTIMATE_BYTES = 100 << 20
MIN_FREE_SHARE = 0.2
_CHUNK_BYTES = 1 << 20
# Level 1 is four times as fast as the default and 10 to 20 % larger on traces.
_GZIP_LEVEL = 1
# Every event of a trace has a phase.
_EVENT = b'"ph"'


def inbox_problem(path: str, estimate_bytes: int = ESTIMATE_BYTES) -> str | None:
    """Return no_inbox or no_space if nothing may be written there, else None."""
    if not (os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)):
        return "no_inbox"
    disk = os.statvfs(path)
    free = disk.f_bavail * disk.f_frsize
    left = free - estimate_bytes
    if free < 2 * estimate_bytes or left < MIN_FREE_SHARE * disk.f_blocks * disk.f_frsize:
        return "no_space"
    return None


def token() -> str:
    """Return a random part of a name, which other users of the inbox cannot take first."""
    return os.urandom(8).hex()


def hand_over(base: str, suffix: str, write: Callable[[int], None]) -> str:
    """Make ``<base>.<token><suffix>`` appear complete and readable; return the token.

    ``write`` gets the descriptor. Raises OSError.
    """
    hidden, chosen = f"{base}.{token()}.tmp", token()
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(hidden, flags, 0o600)
    try:
        write(fd)
        os.fchmod(fd, 0o644)
        os.rename(hidden, f"{base}.{chosen}{suffix}")
        return chosen
    except BaseException:
        os.unlink(hidden)
        raise
    finally:
        os.close(fd)


def write(fd: int, data: bytes) -> None:
    """Write all of ``data``. Raises OSError."""
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(data)


def write_gzip(source: str, fd: int, between: Callable[[], None]) -> int:
    """Compress the trace ``source`` into ``fd`` and count its events; call ``between`` chunks."""
    events, tail = 0, b""
    with (
        open(source, "rb") as plain,
        os.fdopen(os.dup(fd), "wb") as raw,
        gzip.GzipFile("", "wb", _GZIP_LEVEL, raw) as packed,
    ):
        while True:
            chunk = plain.read(_CHUNK_BYTES)
            if not chunk:
                return events
            packed.write(chunk)
            # An event's mark may lie across two chunks.
            events += (tail + chunk).count(_EVENT)
            tail = chunk[1 - len(_EVENT) :]
            between()
