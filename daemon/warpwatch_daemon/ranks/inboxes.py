"""Makes and sweeps inboxes, outside the loop that reads rings, since they lie on a disk.

All processes share one inbox, except those of pods that mount only their own,
``<inbox>/pods/<uid>``: the kubelet makes it when it mounts it, or else this module does.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import secrets
import stat
import time
from collections.abc import Callable, Collection

from warpwatch import rendezvous
from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.folder import RING, RendezvousFolder, is_locked
from warpwatch_daemon.ranks.pods import IDLE_S, PODS, ROUND_S, Complaints, KnownPods, listed
from warpwatch_daemon.ranks.table import MAX_FILES_PER_POD
from warpwatch_runtime.directory import PRIVATE, STICKY, Directory, make

logger = logging.getLogger(__name__)

# The time limit for sweeping one inbox.
SWEEP_S = 0.2


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
        monotonic = self._monotonic
        keep = pods_name(self._shared)
        inbox.sweep(self._shared, older_than_s, now, keep=keep, monotonic=monotonic)
        with contextlib.suppress(OSError), self._inboxes.opened() as inboxes_fd:
            found = listed(inboxes_fd)
            # The order is random, so that no inbox is always the last.
            for uid in random.sample(list(found), len(found)):
                with contextlib.suppress(OSError):
                    inbox.sweep(self._inboxes / uid, older_than_s, now, SWEEP_S, "", monotonic)
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
                    _put_away(base, uid)
        for base in (self._folders, self._inboxes):
            with contextlib.suppress(OSError):
                inbox.remove_swept(base, REMOVE_S, self._monotonic)

    def _exited(self, at: float) -> list[str]:
        """Return the pods that the kubelet has not listed for long enough."""
        known = self._known()
        if known is None:
            self._absent.clear()
            return []
        found: set[str] = set()
        for base in (self._folders, self._inboxes):
            with contextlib.suppress(OSError), base.opened() as fd:
                found.update(listed(fd))
        self._absent = {uid: self._absent.get(uid, at) for uid in found - known.keys()}
        return [uid for uid, since in self._absent.items() if at - since >= GONE_S]

    def _has_processes(self, uid: str) -> bool:
        """Return whether a process holds its ring's lock: then the pod lives."""
        with contextlib.suppress(OSError), (self._folders / uid / rendezvous.RANKS).opened() as fd:
            with os.scandir(fd) as entries:
                names = [entry.name for entry in itertools.islice(entries, MAX_FILES_PER_POD)]
            return any(_is_held(fd, name) for name in names if name.endswith(RING))
        return False


def _is_held(ranks_fd: int, name: str) -> bool:
    with contextlib.suppress(OSError):
        return is_locked(ranks_fd, name)
    return False


def _put_away(base: Directory, uid: str) -> None:
    name = f"{inbox.SWEPT}{secrets.token_hex(8)}"
    with contextlib.suppress(OSError), base.opened() as fd:
        os.rename(uid, name, src_dir_fd=fd, dst_dir_fd=fd)
