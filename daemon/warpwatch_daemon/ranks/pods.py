"""The pods that mount only a folder of their own: found, served, and given up.

A kubelet makes ``pods/<uid>`` when it mounts the folder into the pod. What is in there is the
pod's; what it does to it, it does to itself alone.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import random
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping

from warpwatch import rendezvous
from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.directory import PRIVATE, Directory, make
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.place import PodPlace
from warpwatch_daemon.ranks.table import OpenRing, RingCount, RingTable

logger = logging.getLogger(__name__)

PODS = "pods"
# Each costs an open file, its lock. A kubelet runs 110 pods unless told otherwise.
MAX_PODS = 256
# Folders that are looked at; what is beyond them, until others are removed, is not there.
MAX_LISTED = 4096
# Folders that are there already are looked at so often: for their age, and for what was wrong.
ROUND_S = 60.0
# An empty folder that is not served goes when nothing has changed in it for so long, and sooner
# where there is no place for it. One that is served stays: a pod that trains on Friday and again on
# Monday is met in it, and nobody makes it again.
IDLE_S = 24 * 3600.0
UNSERVED_IDLE_S = 3600.0
# A folder that is in use is kept young by the daemon.
TOUCH_AFTER_S = 3600.0
# What looking for new rings may take of one poll, and sweeping of one inbox.
SCAN_S = 0.05
SWEEP_S = 0.2

# As the API server makes them, and as the kubelet does for static pods.
_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")


class Pods:
    """``sweep_inboxes`` may be called from any thread, all else from the one that polls."""

    def __init__(
        self,
        folder: RendezvousFolder,
        count: RingCount,
        reject: Callable[[str], None],
        scan_interval_s: float,
    ) -> None:
        self._folder = folder
        self._pods = Directory(folder.path) / PODS
        self._inboxes = Directory(folder.inbox) / PODS
        self._count = count
        self._reject = reject
        self._interval_s = scan_interval_s
        self._places: dict[str, PodPlace] = {}
        self._complaints: set[tuple[str, str]] = set()
        # To be scanned in this round.
        self._due: list[str] = []
        self._look_due = self._round_due = 0.0
        self._seen_mtime_ns = -1
        # Whether every folder was looked at since the start.
        self.settled = False

    def place(self, uid: str) -> PodPlace:
        """Of a pod that has a ring."""
        return self._places[uid]

    def close(self) -> None:
        for place in self._places.values():
            place.release()

    # --- rings ---

    def scan(self, now: float, at: float) -> list[OpenRing]:
        """New rings, as far as the time reaches: the pods left over come first the next time."""
        if at >= self._look_due and not self._due:
            self._look_due = at + self._interval_s
            self._look(now, at)
            self._due = list(self._places)
        until = time.monotonic() + SCAN_S
        rings: list[OpenRing] = []
        while self._due and time.monotonic() < until:
            uid = self._due.pop()
            if uid in self._places:
                rings += self._scan_one(uid)
        self.settled = self.settled or not self._due
        return rings

    def _scan_one(self, uid: str) -> list[OpenRing]:
        with self._apart(uid):
            return self._places[uid].table.scan()
        return []

    # --- folders ---

    def _look(self, now: float, at: float) -> None:
        is_round = at >= self._round_due
        try:
            if is_round:
                self._make_folders()
            with self._pods.opened() as fd:
                mtime_ns = os.fstat(fd).st_mtime_ns
                if mtime_ns == self._seen_mtime_ns and not is_round:
                    return
                # A folder that comes within the clock's grain of this look is found at the next.
                self._seen_mtime_ns = mtime_ns if now - mtime_ns / 1e9 > 2 else -1
                found = _listed(fd)
                self._drop_gone(found)
                if is_round:
                    self._round_due = at + ROUND_S
                    self._keep_young(fd, found, now)
                    self._drop_broken()
                self._serve(found)
        except OSError as error:
            self._round_due = at + ROUND_S
            self._complain("pods_unusable", "", error)
            return
        # After a day without a daemon a folder is old, and may have ranks all the same.
        if is_round and self.settled:
            self._remove_idle(found, now)

    def _make_folders(self) -> None:
        for above in (self._folder.path, self._folder.inbox):
            with Directory(above).opened() as fd:
                # Nobody but the kubelet makes folders in there, or looks into those of pods: who
                # mounts one needs nothing of what is above it.
                make(fd, PODS, PRIVATE)

    def _drop_gone(self, found: Mapping[str, os.stat_result]) -> None:
        """A ring that is open is read to its end, wherever its folder is."""
        for uid, place in list(self._places.items()):
            here = found.get(uid)
            if here is None or place.identity != (here.st_dev, here.st_ino):
                place.release()
            if here is None and not place.table.has_rings:
                del self._places[uid]
        self._complaints = {(what, uid) for what, uid in self._complaints if uid in found}

    def _drop_broken(self) -> None:
        """Who cleans up what it mounts gets it again."""
        for place in self._places.values():
            if place.held and not place.is_intact():
                place.release()

    def _serve(self, found: Mapping[str, os.stat_result]) -> None:
        has_room = True
        for uid in sorted(found, key=lambda uid: found[uid].st_ctime, reverse=True):
            place = self._places.get(uid)
            if place is not None and place.held:
                continue
            if place is None:
                # Where there is none for this one, there is none for those that are older.
                has_room = has_room and self._has_room(found, uid)
                if not has_room:
                    self._complain("too_many_pods", uid, f"{MAX_PODS} pods are served already")
                    continue
                place = self._new(uid)
            with self._apart(uid):
                place.hold(self._folder.version)
                self._places[uid] = place

    def _new(self, uid: str) -> PodPlace:
        ranks = self._pods / uid / rendezvous.RANKS
        table = RingTable(ranks, self._reject, 0.0, self._count, uid)
        return PodPlace(uid, self._pods, self._inboxes, table)

    def _has_room(self, found: Mapping[str, os.stat_result], uid: str) -> bool:
        """Whether one more can be served; the place of an older folder without rings is given up.

        A pod can make its folder's last change no newer than now.
        """
        if len(self._places) < MAX_PODS:
            return True
        without = [uid for uid, place in self._places.items() if not place.table.has_rings]
        oldest = min(without, key=lambda uid: found[uid].st_ctime, default=None)
        if oldest is None or found[oldest].st_ctime >= found[uid].st_ctime:
            return False
        self._places.pop(oldest).release()
        return True

    def _keep_young(self, pods_fd: int, found: Mapping[str, os.stat_result], now: float) -> None:
        """By its age a folder is served before others after a restart, and removed."""
        for uid, place in self._places.items():
            is_used = place.table.has_rings and uid in found
            if is_used and now - found[uid].st_ctime >= TOUCH_AFTER_S:
                with contextlib.suppress(OSError):
                    os.utime(uid, dir_fd=pods_fd, follow_symlinks=False)

    def _remove_idle(self, found: Mapping[str, os.stat_result], now: float) -> None:
        limit_s = UNSERVED_IDLE_S if len(self._places) >= MAX_PODS else IDLE_S
        for uid, status in found.items():
            if uid in self._places or now - status.st_ctime < limit_s:
                continue
            with self._apart(uid):
                if not self._new(uid).remove():
                    self._complain("pod_leftovers", uid, "what is in its folder stays")

    @contextlib.contextmanager
    def _apart(self, uid: str) -> Iterator[None]:
        """What goes wrong with a pod, foreseen or not, costs that pod alone."""
        try:
            yield
        except Exception as error:
            self._complain("pod_unusable", uid, f"{type(error).__name__}: {error}")

    def _complain(self, what: str, uid: str, why: object) -> None:
        """Counted and logged once, until the folder goes."""
        if (what, uid) not in self._complaints:
            self._complaints.add((what, uid))
            self._reject(what)
            logger.warning("%s: pod %s: %s", what, uid or "folders", why)

    # --- inboxes ---

    def keeps(self, name: str) -> bool:
        """Whether this name in the shared inbox is that of the pods' inboxes.

        Everybody may write to the shared inbox, and have made ``pods`` before the daemon.
        """
        if name != PODS:
            return False
        try:
            found = self._inboxes.path.lstat()
        except OSError:
            return True
        return stat.S_ISDIR(found.st_mode) and found.st_uid in (0, os.geteuid())

    def sweep_inboxes(self, older_than_s: float, now: float) -> None:
        """Remove what nobody collected, and the inboxes of pods that have no folder any more."""
        with contextlib.suppress(OSError), self._inboxes.opened() as inboxes_fd:
            found = _listed(inboxes_fd)
            # None is always the last, whatever others put into theirs.
            for uid in random.sample(list(found), len(found)):
                with contextlib.suppress(OSError):
                    inbox.sweep(self._inboxes / uid, older_than_s, now, limit_s=SWEEP_S)
                    if now - found[uid].st_ctime >= IDLE_S and not self._is_there(uid):
                        os.rmdir(uid, dir_fd=inboxes_fd)

    def _is_there(self, uid: str) -> bool:
        try:
            with self._pods.opened() as fd:
                os.stat(uid, dir_fd=fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True


def _listed(folder_fd: int) -> dict[str, os.stat_result]:
    """The folders whose names are a pod's UID."""
    found: dict[str, os.stat_result] = {}
    with os.scandir(folder_fd) as entries:
        for entry in itertools.islice(entries, MAX_LISTED):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and _UID.fullmatch(entry.name):
                    found[entry.name] = status
    return found
