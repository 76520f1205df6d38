"""Creates, owns and locks the rendezvous folders: the shared one, and those of pods.

The lock tells shims that a daemon lives, and a second daemon that it is second.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warpwatch import protocol, rendezvous
from warpwatch.protocol import PROTOCOL_VERSION
from warpwatch_daemon.config import RendezvousConfig
from warpwatch_daemon.ranks import claims
from warpwatch_daemon.ranks.table import RingTable
from warpwatch_runtime.directory import (
    OWNED,
    STICKY,
    Directory,
    check_regular,
    make,
    make_parents,
    open_checked,
    open_own,
    set_mode,
)
from warpwatch_telemetry.errors import UsageError, WarpwatchError


def resolve(config: RendezvousConfig, environ: Mapping[str, str], uid: int) -> tuple[Path, Path]:
    """Return the folder and the inbox that this daemon would use."""
    environ = _named(config, environ)
    chosen = _choose(environ, uid)
    return Path(chosen.path), Path(rendezvous.inbox(chosen, environ, uid))


def in_use(config: RendezvousConfig, environ: Mapping[str, str], uid: int) -> tuple[Path, Path]:
    """Return those of the daemon that trainings of this user find; else as ``resolve``."""
    environ = _named(config, environ)
    found = rendezvous.find_daemon(environ, uid)
    if found is None:
        return resolve(config, environ, uid)
    found.close()
    return Path(found.candidate.path), Path(rendezvous.inbox(found.candidate, environ, uid))


def _named(config: RendezvousConfig, environ: Mapping[str, str]) -> dict[str, str]:
    named = {"WARPWATCH_DIR": config.dir, "WARPWATCH_INBOX": config.inbox}
    return dict(environ) | {name: path for name, path in named.items() if path != "auto"}


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
    """The shared folder, locked for as long as the daemon lives."""

    def __init__(self, path: Path, inbox: Path, version: str) -> None:
        self.path = path
        self.inbox = inbox
        self.version = version
        self.ranks = path / rendezvous.RANKS
        self.commands = path / rendezvous.COMMANDS
        private = str(path) == rendezvous.private_dir(os.getuid())
        _make(path, 0o700 if private else OWNED)
        _make(self.commands, OWNED)
        for folder in (self.ranks, inbox):
            _make(folder, STICKY)
        try:
            with Directory(path).opened() as fd:
                self._lock_fd = hold(fd, version, inbox)
        except AlreadyHeld as holder:
            raise UsageError(
                f"{path} is already served by {holder}; stop it or set rendezvous.dir"
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
    """Another process, named by the text, holds the lock."""


def hold(folder_fd: int, version: str, inbox: Path) -> int:
    """Lock ``daemon.lock`` until the returned descriptor is closed. Raises AlreadyHeld, OSError."""
    fd = _locked(folder_fd)
    if fd is None:
        # Only readers hold it, as any user can: replace the file.
        os.unlink(rendezvous.LOCK_FILE, dir_fd=folder_fd)
        fd = _locked(folder_fd)
    if fd is None:
        raise AlreadyHeld("a reader")
    try:
        own = {"version": version, "uid": os.getuid(), "pid": os.getpid()}
        content = own | {"protocol": PROTOCOL_VERSION, "inbox": str(inbox)}
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(content).encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _locked(folder_fd: int) -> int | None:
    """Return the locked file, or None if readers hold it."""
    fd = open_own(folder_fd, rendezvous.LOCK_FILE)
    if rendezvous.take_lock(fd):
        return fd
    holder, said = rendezvous.lock_holder(fd), os.pread(fd, 4096, 0)
    os.close(fd)
    if holder is not None:
        raise AlreadyHeld(_describe(said))
    return None


def _describe(content: bytes) -> str:
    """Return one line about the holder; in a pod's folder the pod writes the content."""
    try:
        said = json.loads(content)
        text = f"warpwatch {said['version']} (pid {said['pid']}, uid {said['uid']})"
        return claims.clean(text)
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"


RING = ".ring"
COMMAND = ".cmd"
MAX_SEQUENCE = (1 << 64) - 1
# The folders in a pod's folder, with their mode.
_MADE = {rendezvous.RANKS: STICKY, rendezvous.COMMANDS: OWNED}


class RingFolder:
    """The rings of one folder, its commands and its inbox.

    inbox_remedy: the missing setting of a training without an inbox.
    """

    def __init__(
        self, folder: Directory, inbox: Directory, table: RingTable, inbox_remedy: str
    ) -> None:
        self.folder = folder
        self.inbox = inbox
        self.table = table
        self.inbox_remedy = inbox_remedy
        self.commands = CommandFiles(folder / rendezvous.COMMANDS)

    def sweep_commands(self) -> None:
        """Remove the command files of rings that are gone. Raises OSError."""
        rings = _names(self.folder / rendezvous.RANKS, RING, self.table.max_files)
        folder = self.folder / rendezvous.COMMANDS
        for stem in _names(folder, COMMAND, self.table.max_files) - rings:
            folder.unlink(f"{stem}{COMMAND}")


class PodFolder(RingFolder):
    """The folder of a pod that mounts only this one.

    Root in the container can change anything here; only the daemon can change the parent, ``pods``.
    """

    def __init__(self, uid: str, pods: Directory, inboxes: Directory, table: RingTable) -> None:
        remedy = f"mount {inboxes.path} with subPathExpr $(POD_UID) at {rendezvous.SYSTEM_INBOX}"
        super().__init__(pods / uid, inboxes / uid, table, remedy)
        self._lock_fd = -1
        # Device and inode of the held folder.
        self.identity: tuple[int, int] | None = None

    @property
    def held(self) -> bool:
        return self._lock_fd >= 0

    def hold(self, version: str) -> None:
        """Make the files that a shim needs, the lock last. Raises OSError or AlreadyHeld."""
        with self.folder.opened() as fd:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid():
                # A shim would not obey its commands.
                raise PermissionError(errno.EPERM, f"it belongs to uid {found.st_uid}")
            # The kubelet gave it the mode of the parent, and the container may have any user.
            set_mode(fd, OWNED)
            for name, mode in _MADE.items():
                make(fd, name, mode)
            self.sweep_commands()
            self._lock_fd = hold(fd, version, self.inbox.path)
            self.identity = (found.st_dev, found.st_ino)

    def is_intact(self) -> bool:
        """Return whether a shim would still find the files of ``hold``."""
        try:
            with self.folder.opened() as fd:
                made = [os.stat(name, dir_fd=fd, follow_symlinks=False) for name in _MADE]
                found = os.stat(rendezvous.LOCK_FILE, dir_fd=fd, follow_symlinks=False)
        except OSError:
            return False
        is_locked = os.path.samestat(found, os.fstat(self._lock_fd))
        return is_locked and all(stat.S_ISDIR(status.st_mode) for status in made)

    def release(self) -> None:
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


def is_locked(folder_fd: int, name: str) -> bool:
    """Return whether a process holds the file. Raises OSError unless it is a regular file."""
    fd = open_checked(folder_fd, name, os.O_RDONLY, check_regular)
    try:
        return rendezvous.lock_holder(fd) is not None
    finally:
        os.close(fd)


class CommandFiles:
    """The command files of one folder, one for each ring."""

    def __init__(self, folder: Directory) -> None:
        self._folder = folder

    def prepare(self, ring_name: str) -> None:
        """Make the process's command file before its first use. Raises OSError."""
        with self._folder.opened() as folder_fd:
            fd = open_own(folder_fd, _name(ring_name))
        try:
            if os.fstat(fd).st_size != protocol.COMMAND_SIZE:
                os.ftruncate(fd, 0)
                os.pwrite(fd, protocol.encode_command(0, {}), 0)
        finally:
            os.close(fd)

    def send(self, ring_name: str, command: dict[str, Any]) -> None:
        """Replace the process's command. The sequence number is written last. Raises OSError."""
        with self._folder.opened() as folder_fd:
            fd = open_checked(folder_fd, _name(ring_name), os.O_RDWR, check_regular)
        try:
            offset = protocol.COMMAND_SEQUENCE_OFFSET
            # In a pod's folder the last number may be anything.
            sequence = int.from_bytes(os.pread(fd, 8, offset), "little") % MAX_SEQUENCE + 1
            data = protocol.encode_command(sequence, command)
            os.pwrite(fd, data[offset + 8 :], offset + 8)
            os.pwrite(fd, data[offset : offset + 8], offset)
        finally:
            os.close(fd)

    def remove(self, ring_name: str) -> None:
        self._folder.unlink(_name(ring_name))


def _names(folder: Directory, suffix: str, limit: int) -> set[str]:
    """Return names with this suffix, without it, of at most ``limit`` files. Raises OSError."""
    with folder.opened() as fd, os.scandir(fd) as entries:
        names = {entry.name for entry in itertools.islice(entries, limit)}
    return {name.removesuffix(suffix) for name in names if name.endswith(suffix)}


def _name(ring_name: str) -> str:
    return ring_name.removesuffix(".ring") + COMMAND
