"""The folders and inboxes of pods that are gone are removed, as long as someone says which are."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import secrets
import time
from collections.abc import Callable

from warpwatch import rendezvous
from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.pods import PODS, KnownPods, listed
from warpwatch_daemon.ranks.ring_folder import RING, is_locked
from warpwatch_daemon.ranks.table import MAX_FILES_PER_POD
from warpwatch_runtime.directory import Directory

logger = logging.getLogger(__name__)

# How long the kubelet must not have had a pod.
GONE_S = 600.0
# What removing may take of one round; the rest is for the next.
REMOVE_S = 2.0


class GonePods:
    """``sweep`` is for one loop: what a pod left may be much. ``at`` is monotonic.

    A folder gets a name that is no pod's before it is emptied: half of one is never served, and
    what is left of it is found again after a restart.
    """

    def __init__(
        self,
        folder: RendezvousFolder,
        known: KnownPods,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folders = Directory(folder.path) / PODS
        self._inboxes = Directory(folder.inbox) / PODS
        self._known = known
        self._monotonic = monotonic
        # Since when the kubelet has not had them.
        self._absent: dict[str, float] = {}

    def sweep(self, at: float) -> None:
        known = self._known()
        if known is None:
            self._absent.clear()
            return
        found: set[str] = set()
        for base in (self._folders, self._inboxes):
            with contextlib.suppress(OSError), base.opened() as fd:
                found.update(listed(fd))
        self._absent = {uid: self._absent.get(uid, at) for uid in found - known.keys()}
        for uid, since in self._absent.items():
            if at - since >= GONE_S and not self._has_processes(uid):
                logger.info("removing the folders of pod %s, which is gone", uid)
                for base in (self._folders, self._inboxes):
                    _put_away(base, uid)
        for base in (self._folders, self._inboxes):
            with contextlib.suppress(OSError):
                inbox.remove_swept(base, REMOVE_S, self._monotonic)

    def _has_processes(self, uid: str) -> bool:
        """Whether one holds its ring's lock: the pod lives, whatever the kubelet says."""
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
