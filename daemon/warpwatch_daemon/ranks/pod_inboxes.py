"""The inboxes of pods, which lie on a disk: nothing here is done in the loop that reads rings.

``<inbox>/pods/<uid>`` is made by the kubelet when it mounts it into the pod, or else here.
"""

from __future__ import annotations

import contextlib
import os
import random
import stat
from collections.abc import Callable, Collection
from pathlib import Path

from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.complaints import Complaints
from warpwatch_daemon.ranks.directory import PRIVATE, STICKY, Directory, make
from warpwatch_daemon.ranks.pods import IDLE_S, PODS, ROUND_S, listed

# What sweeping may take of one inbox.
SWEEP_S = 0.2


class PodInboxes:
    """``tend`` and ``sweep`` are for one loop each. ``pods``: the pods' folders of rings."""

    def __init__(self, shared: Path, pods: Directory, reject: Callable[[str], None]) -> None:
        self._shared = Directory(shared)
        self._inboxes = self._shared / PODS
        self._pods = pods
        self._complaints = Complaints(reject)
        self._tended: set[str] = set()
        self._round_due = 0.0

    def tend(self, served: Collection[str], at: float) -> None:
        """Make what these pods lack, once a round whether they are known or not; monotonic."""
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
                # No one but the kubelet makes folders in there, or looks into those of pods.
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
            # A kubelet gave it the mode of the folder above, and any user is in the container.
            make(inboxes_fd, uid, STICKY)
        except OSError as error:
            self._complaints.make("pod_unusable", uid, error)

    def keeps(self, name: str) -> bool:
        """Whether this name in the shared inbox is that of the pods' inboxes.

        Everyone may write to the shared inbox, and have made ``pods`` before the daemon.
        """
        if name != PODS:
            return False
        try:
            found = self._inboxes.path.lstat()
        except OSError:
            return True
        return stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.geteuid())

    def sweep(self, older_than_s: float, now: float) -> None:
        """Remove what was never collected, and the inboxes of pods that have no folder any more."""
        with contextlib.suppress(OSError), self._inboxes.opened() as inboxes_fd:
            found = listed(inboxes_fd)
            # In another order each time: no inbox is always the last, whatever others hold.
            for uid in random.sample(list(found), len(found)):
                with contextlib.suppress(OSError):
                    inbox.sweep(self._inboxes / uid, older_than_s, now, limit_s=SWEEP_S)
                    if now - found[uid].st_ctime >= IDLE_S and not self._has_folder(uid):
                        os.rmdir(uid, dir_fd=inboxes_fd)

    def _has_folder(self, uid: str) -> bool:
        try:
            with self._pods.opened() as fd:
                os.stat(uid, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True
