"""The inboxes, where processes leave the files of captures: copies files out, sweeps and removes.

All users may write to an inbox, so none of its content is trusted. All processes share one, except
those of pods that mount only their own, ``<inbox>/pods/<uid>``: the kubelet makes it when it mounts
it, or else this module does. They lie on a disk, so the loop that reads rings touches none.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import random
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from warpwatch import rendezvous
from warpwatch_capturing.participant import FetchError
from warpwatch_daemon.ranks.folder import RING, RendezvousFolder, is_locked
from warpwatch_daemon.ranks.pods import IDLE_S, PODS, ROUND_S, Complaints, KnownPods, listed
from warpwatch_daemon.ranks.table import MAX_FILES, MAX_FILES_PER_POD
from warpwatch_runtime import files
from warpwatch_runtime.directory import FOLDER_FLAGS, PRIVATE, STICKY, Directory, make, open_checked

logger = logging.getLogger(__name__)

# The end of a file's name, by the kind of capture.
SUFFIX = {"torch": ".pt.trace.json.gz", "stacks": ".stacks.json", "memory": ".memory.json"}
# That of the allocator's snapshot, which comes with ``memory`` from ranks on a GPU.
SNAPSHOT_SUFFIX = ".memory.pickle"
MAX_FILE_BYTES = 8 << 30
# A file must leave this much of the store's file system free.
MIN_FREE_BYTES = 200 << 20
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
    limit_s: float,
    keep: str = "",
    monotonic: Callable[[], float] = time.monotonic,
) -> int:
    """Remove uncollected files, then folders, except ``keep``; return their number.

    The rest stays until the next sweep if removing fails or ``limit_s`` is over. ``now`` is wall
    clock. Raises OSError.
    """
    until = monotonic() + limit_s
    removed = 0
    folders: list[str] = []
    with inbox.opened() as inbox_fd:
        with os.scandir(inbox_fd) as entries:
            for entry in itertools.takewhile(lambda _: monotonic() < until, entries):
                with contextlib.suppress(OSError):
                    # Users can set the time of the content, not this one. After a clock change it
                    # may lie ahead.
                    age_s = now - entry.stat(follow_symlinks=False).st_ctime
                    if abs(age_s) < older_than_s or entry.name == keep:
                        continue
                    if _is_unlinked(inbox_fd, entry.name):
                        removed += 1
                    else:
                        folders.append(entry.name)
        return removed + _remove_folders(inbox_fd, folders, until, monotonic)


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
                        new = _swept_name()
                        os.rename(entry.name, new, src_dir_fd=folder_fd, dst_dir_fd=inbox_fd)
                        lifted.append(new)
    finally:
        os.close(folder_fd)
    return lifted


def _swept_name() -> str:
    return f"{SWEPT}{secrets.token_hex(8)}"


# The time limits for sweeping the shared inbox, and that of one pod.
SHARED_SWEEP_S, POD_SWEEP_S = 2.0, 0.2


class Inboxes:
    """The inboxes of all pods, for one loop each of ``tend`` and ``sweep``.

    ``served``: the UIDs of pods with rings.
    """

    def __init__(
        self,
        folder: RendezvousFolder,
        served: Callable[[], Collection[str]],
        reject: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._shared = Directory(folder.inbox)
        self._inboxes = self._shared / PODS
        self._pods = Directory(folder.path) / PODS
        self._served = served
        self._monotonic = monotonic
        self._complaints = Complaints(reject)
        self._tended: set[str] = set()
        self._round_due = 0.0

    def tend(self, at: float) -> None:
        """Make missing inboxes, for all pods once a round. ``at`` is monotonic."""
        served = self._served()
        is_round = at >= self._round_due
        if is_round:
            self._round_due = at + ROUND_S
            self._tended.clear()
        self._tended.intersection_update(served)
        new = set(served) - self._tended
        if not new and not is_round:
            return
        self._tended |= new
        try:
            with self._shared.opened() as fd:
                # Only the kubelet makes folders in there or reads those of pods.
                make(fd, PODS, PRIVATE)
            with self._inboxes.opened() as fd:
                for uid in new:
                    self._make(fd, uid)
        except OSError as error:
            self._complaints.make("pods_unusable", "", error)
            return
        self._complaints.keep(served)

    def _make(self, inboxes_fd: int, uid: str) -> None:
        try:
            # A kubelet gave it the mode of the parent, and the container may have any user.
            make(inboxes_fd, uid, STICKY)
        except OSError as error:
            self._complaints.make("pod_unusable", uid, error)

    def sweep(self, older_than_s: float, now: float) -> None:
        """Remove uncollected files, and inboxes of pods without a folder. Raises OSError.

        ``now`` is wall clock.
        """
        limits = (older_than_s, now, SHARED_SWEEP_S, pods_name(self._shared), self._monotonic)
        sweep(self._shared, *limits)
        with contextlib.suppress(OSError), self._inboxes.opened() as inboxes_fd:
            found = listed(inboxes_fd)
            # The order is random, so that no inbox is always the last.
            for uid in random.sample(list(found), len(found)):
                with contextlib.suppress(OSError):
                    limits = (older_than_s, now, POD_SWEEP_S, "", self._monotonic)
                    sweep(self._inboxes / uid, *limits)
                    if now - found[uid].st_ctime >= IDLE_S and not self._has_folder(uid):
                        os.rmdir(uid, dir_fd=inboxes_fd)

    def _has_folder(self, uid: str) -> bool:
        try:
            with self._pods.opened() as fd:
                os.stat(uid, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True


def pods_name(shared: Directory) -> str:
    """Return the name of the pods' inboxes in the shared inbox; empty if another user took it."""
    try:
        found = (shared / PODS).path.lstat()
    except OSError:
        return PODS
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.geteuid())
    return PODS if is_own else ""


# The kubelet must not list a pod for this time.
GONE_S = 600.0
# The time limit of one round of removing.
REMOVE_S = 2.0


class GonePods:
    """Removes the folders of pods that the kubelet no longer lists, in a loop of its own.

    The folders of ``idle`` pods go, too, but not their inboxes. A folder is renamed before it is
    emptied: half of one is never served, and the rest is found again after a restart.
    """

    def __init__(
        self,
        folder: RendezvousFolder,
        known: KnownPods,
        idle: Callable[[], Collection[str]],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folders = Directory(folder.path) / PODS
        self._inboxes = Directory(folder.inbox) / PODS
        self._known = known
        self._idle = idle
        self._monotonic = monotonic
        # Since when the kubelet does not list them, monotonic.
        self._absent: dict[str, float] = {}

    def sweep(self, at: float) -> None:
        both = (self._folders, self._inboxes)
        gone = dict.fromkeys(self._idle(), both[:1]) | dict.fromkeys(self._exited(at), both)
        for uid, bases in gone.items():
            if not self._has_processes(uid):
                logger.info("removing the folders of pod %s, which is gone", uid)
                for base in bases:
                    with contextlib.suppress(OSError), base.opened() as fd:
                        os.rename(uid, _swept_name(), src_dir_fd=fd, dst_dir_fd=fd)
        for base in both:
            with contextlib.suppress(OSError):
                remove_swept(base, REMOVE_S, self._monotonic)

    def _exited(self, at: float) -> list[str]:
        known = self._known()
        if known is None:
            self._absent.clear()
            return []
        gone = pods_in(self._folders, self._inboxes) - known.keys()
        self._absent = {uid: self._absent.get(uid, at) for uid in gone}
        return [uid for uid, since in self._absent.items() if at - since >= GONE_S]

    def _has_processes(self, uid: str) -> bool:
        """Return whether a process holds its ring's lock: then the pod lives."""
        with contextlib.suppress(OSError), (self._folders / uid / rendezvous.RANKS).opened() as fd:
            with os.scandir(fd) as entries:
                names = [entry.name for entry in itertools.islice(entries, MAX_FILES_PER_POD)]
            for name in names:
                with contextlib.suppress(OSError):
                    if name.endswith(RING) and is_locked(fd, name):
                        return True
        return False


def pods_in(*folders: Directory) -> set[str]:
    """Return the UIDs of all pods that have a folder in one of these."""
    found: set[str] = set()
    for folder in folders:
        with contextlib.suppress(OSError), folder.opened() as fd:
            found.update(listed(fd))
    return found
