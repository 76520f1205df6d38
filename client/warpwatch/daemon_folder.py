"""The rendezvous folder of a daemon that this process may trust."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

from warpwatch import rendezvous
from warpwatch.descriptors import Descriptor
from warpwatch.rendezvous import Folder


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
    for folder in rendezvous.candidates(environ, uid):
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
        fd = os.open(rendezvous.LOCK_FILE, flags, dir_fd=folder_fd)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or (trusted and status.st_uid not in trusted):
            return False
        return rendezvous.lock_holder(fd) is not None
    except OSError:
        # A file system without locks cannot say whether a daemon lives.
        return False
    finally:
        os.close(fd)
