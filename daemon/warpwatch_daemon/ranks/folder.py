"""The rendezvous folder: created, owned and locked by the daemon.

By the lock shims know that a daemon lives, and a second daemon that it is second.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warpwatch import rendezvous
from warpwatch.protocol import PROTOCOL_VERSION
from warpwatch_daemon.config.sections import RendezvousConfig
from warpwatch_daemon.ranks import claims
from warpwatch_runtime.directory import OWNED, STICKY, Directory, make_parents, open_own
from warpwatch_telemetry.errors import UsageError, WarpwatchError


def resolve(config: RendezvousConfig, environ: Mapping[str, str], uid: int) -> tuple[Path, Path]:
    """(folder, inbox) that this daemon would use."""
    environ = dict(environ)
    if config.dir != "auto":
        environ["WARPWATCH_DIR"] = config.dir
    if config.inbox != "auto":
        environ["WARPWATCH_INBOX"] = config.inbox
    chosen = _choose(environ, uid)
    return Path(chosen.path), Path(rendezvous.inbox(chosen, environ, uid))


def _choose(environ: Mapping[str, str], uid: int) -> rendezvous.Folder:
    folders = rendezvous.candidates(environ, uid)
    for folder in folders:
        if folder.explicit or uid == 0 or _is_own(folder.path, uid):
            return folder
    own = [folder for folder in folders if folder.path != rendezvous.SYSTEM_DIR]
    return own[0]


def _is_own(path: str, uid: int) -> bool:
    try:
        return os.lstat(path).st_uid == uid
    except OSError:
        return False


class RendezvousFolder:
    """Held for as long as the daemon lives; a second daemon on it is refused."""

    def __init__(self, path: Path, inbox: Path, version: str) -> None:
        self.path = path
        self.inbox = inbox
        self.version = version
        self.ranks = path / rendezvous.RANKS
        self.commands = path / rendezvous.COMMANDS
        self._create()
        self._lock_fd = self._lock()

    def _create(self) -> None:
        private = str(self.path) == rendezvous.private_dir(os.getuid())
        _make(self.path, 0o700 if private else OWNED)
        _make(self.commands, OWNED)
        for folder in (self.ranks, self.inbox):
            _make(folder, STICKY)

    def _lock(self) -> int:
        try:
            with Directory(self.path).opened() as fd:
                return hold(fd, about(self.version, self.inbox))
        except AlreadyHeld as holder:
            raise UsageError(
                f"{self.path} is already served by {holder}; stop it or set rendezvous.dir"
            ) from holder

    def close(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def _make(path: Path, mode: int) -> None:
    try:
        make_parents(path)
        path.mkdir(exist_ok=True)
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise UsageError(f"{path} is not a folder; remove it or set rendezvous.dir")
        if found.st_uid != os.getuid():
            raise UsageError(
                f"{path} belongs to uid {found.st_uid}, not to this daemon's {os.getuid()}; "
                "remove it or set rendezvous.dir and rendezvous.inbox"
            )
        path.chmod(mode)
    except OSError as error:
        raise UsageError(
            f"cannot create {path}: {error.strerror}; set rendezvous.dir and rendezvous.inbox "
            "(or WARPWATCH_DIR and WARPWATCH_INBOX) to folders that this user may write"
        ) from error


class AlreadyHeld(WarpwatchError):
    """Another process holds the lock; the text says who."""


def about(version: str, inbox: Path) -> dict[str, Any]:
    """What the lock's file says of the daemon."""
    return {
        "version": version,
        "uid": os.getuid(),
        "pid": os.getpid(),
        "protocol": PROTOCOL_VERSION,
        "inbox": str(inbox),
    }


def hold(folder_fd: int, content: dict[str, Any]) -> int:
    """The descriptor that holds ``daemon.lock`` until it is closed. Raises AlreadyHeld, OSError."""
    fd = _locked(folder_fd)
    if fd is None:
        # Only readers hold it, as anyone can: take a new file in its place.
        os.unlink(rendezvous.LOCK_FILE, dir_fd=folder_fd)
        fd = _locked(folder_fd)
    if fd is None:
        raise AlreadyHeld("a reader")
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(content).encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _locked(folder_fd: int) -> int | None:
    """The lock's file, locked; None where only readers are in the way."""
    fd = open_own(folder_fd, rendezvous.LOCK_FILE)
    if rendezvous.take_lock(fd):
        return fd
    holder, said = rendezvous.lock_holder(fd), os.pread(fd, 4096, 0)
    os.close(fd)
    if holder is not None:
        raise AlreadyHeld(_describe(said))
    return None


def _describe(content: bytes) -> str:
    """One line; in a pod's own folder the content is the pod's."""
    try:
        said = json.loads(content)
        text = f"warpwatch {said['version']} (pid {said['pid']}, uid {said['uid']})"
        return claims.clean(text)
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
