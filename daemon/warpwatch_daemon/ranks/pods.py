"""Finds and serves pods that mount only a folder of their own.

A kubelet makes ``pods/<uid>`` when it mounts the folder into the pod. The content is the pod's: a
pod that damages it harms only itself.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Container, Iterator, Mapping

from warpwatch import rendezvous
from warpwatch_daemon.ranks.folder import PodFolder, RendezvousFolder
from warpwatch_daemon.ranks.table import Limits, OpenRing, RingCount, RingTable
from warpwatch_runtime.directory import PRIVATE, Directory, make
from warpwatch_telemetry.samples import Pod

logger = logging.getLogger(__name__)

PODS = "pods"
# Further folders are ignored until others are removed.
MAX_LISTED = 4096
# The interval at which known folders are checked for age and damage.
ROUND_S = 60.0
# A folder that is not served is removed if it did not change for this time, or sooner if
# others need its place. A served one stays: a pod may train on Friday and again on Monday, and
# nobody would make its folder again.
IDLE_S = 24 * 3600.0
UNSERVED_IDLE_S = 3600.0
# The daemon renews the time of a folder in use after this time.
TOUCH_AFTER_S = 3600.0
# Rings of a pod that the kubelet does not list yet are ignored for this time.
UNKNOWN_S = 15.0

# The node's pods by UID, as the kubelet lists them; None while unknown.
KnownPods = Callable[[], Mapping[str, Pod] | None]

# UIDs of the API server, and those of the kubelet for static pods.
_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")


class Complaints:
    """Counts and logs each trouble with a pod's folders once; ``reject`` receives the reason."""

    def __init__(self, reject: Callable[[str], None]) -> None:
        self._reject = reject
        self._made: set[tuple[str, str]] = set()

    def make(self, reason: str, uid: str, why: object) -> None:
        """Report trouble of a pod, or of the folder of all pods if ``uid`` is empty."""
        if (reason, uid) not in self._made:
            self._made.add((reason, uid))
            self._reject(reason)
            logger.warning("%s: pod %s: %s", reason, uid or "folders", why)

    def keep(self, uids: Container[str]) -> None:
        """Forget the complaints about other pods."""
        self._made = {(reason, uid) for reason, uid in self._made if uid in uids}


class Pods:
    """The pods' folders, for the thread that polls. ``known`` None: no kubelet is asked."""

    def __init__(
        self,
        folder: RendezvousFolder,
        count: RingCount,
        reject: Callable[[str], None],
        scan_interval_s: float,
        limits: Limits,
        known: KnownPods | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder = folder
        self._known = known
        self._monotonic = monotonic
        self._limits = limits
        self._pods = Directory(folder.path) / PODS
        self._count = count
        self._reject = reject
        self._interval_s = scan_interval_s
        self._folders: dict[str, PodFolder] = {}
        self._complaints = Complaints(reject)
        # Pods to scan in this round, and whether one of them waits for the kubelet.
        self._due: list[str] = []
        self._awaits = False
        # When each pod without a known namespace was first seen.
        self._met: dict[str, float] = {}
        self._look_due = self._round_due = 0.0
        self._seen_mtime_ns = -1
        # Whether every folder was scanned since the start.
        self.settled = False
        # Pods that are not served, and whose folder did not change for long: it is to be removed.
        self.idle: frozenset[str] = frozenset()

    @property
    def served(self) -> tuple[str, ...]:
        """The UIDs of the pods whose folders are scanned for rings."""
        return tuple(self._folders)

    def folder(self, uid: str) -> PodFolder:
        return self._folders[uid]

    def close(self) -> None:
        for folder in self._folders.values():
            folder.release()

    # --- rings ---

    def scan(self, now: float, at: float) -> list[OpenRing]:
        """Return new rings within the time limit; skipped pods come first the next time."""
        if at >= self._look_due and not self._due:
            self._look_due = at + self._interval_s
            self._look(now, at)
            self._due = list(self._folders)
            self._awaits = False
        until = self._monotonic() + self._limits.scan_s
        rings: list[OpenRing] = []
        while self._due and self._monotonic() < until:
            uid = self._due.pop()
            if uid in self._folders:
                rings += self._scan_one(uid, now, at)
        self.settled = self.settled or not (self._due or self._awaits)
        return rings

    def _scan_one(self, uid: str, now: float, at: float) -> list[OpenRing]:
        with self._apart(uid):
            table = self._folders[uid].table
            if self._waits_for_namespace(uid, table, at):
                self._awaits = True
                return []
            rings = table.scan(now, at)
            if rings and self._known is not None and table.namespace is None:
                why = "the kubelet does not know it; its jobs belong to the users of its files"
                self._complaints.make("unknown_pod", uid, why)
            return rings
        return []

    def _waits_for_namespace(self, uid: str, table: RingTable, at: float) -> bool:
        """Return whether the kubelet may still name the pod's namespace; the table gets it."""
        if self._known is None or table.namespace is not None:
            return False
        pod = (self._known() or {}).get(uid)
        if pod is not None:
            table.namespace = pod.namespace
            return False
        return at - self._met.setdefault(uid, at) < UNKNOWN_S

    # --- folders ---

    def _look(self, now: float, at: float) -> None:
        is_round = at >= self._round_due
        try:
            if is_round:
                with Directory(self._folder.path).opened() as fd:
                    # Only the kubelet makes folders in there; a pod that mounts one needs no access
                    # to the parent.
                    make(fd, PODS, PRIVATE)
            with self._pods.opened() as fd:
                mtime_ns = os.fstat(fd).st_mtime_ns
                if mtime_ns == self._seen_mtime_ns and not is_round:
                    return
                # A folder made within the clock's resolution of this look is found at the next.
                self._seen_mtime_ns = mtime_ns if now - mtime_ns / 1e9 > 2 else -1
                found = listed(fd)
                self._drop_gone(found)
                if is_round:
                    self._round_due = at + ROUND_S
                    self._keep_young(fd, found, now)
                    # Damaged folders are made again.
                    for folder in self._folders.values():
                        if folder.held and not folder.is_intact():
                            folder.release()
                self._serve(found)
        except OSError as error:
            self._round_due = at + ROUND_S
            self._complaints.make("pods_unusable", "", error)
            return
        # After a day without a daemon a folder in use is old, too.
        if is_round and self.settled:
            self.idle = self._idle(found, now)

    def _drop_gone(self, found: Mapping[str, os.stat_result]) -> None:
        """Drop removed folders; an open ring is read to its end all the same."""
        for uid, folder in list(self._folders.items()):
            here = found.get(uid)
            if here is None or folder.identity != (here.st_dev, here.st_ino):
                folder.release()
            if here is None and not folder.table.open:
                del self._folders[uid]
        self._met = {uid: met for uid, met in self._met.items() if uid in self._folders}
        self._complaints.keep(found)

    def _serve(self, found: Mapping[str, os.stat_result]) -> None:
        has_room = True
        for uid in sorted(found, key=lambda uid: found[uid].st_ctime, reverse=True):
            folder = self._folders.get(uid)
            if folder is not None and folder.held:
                continue
            if folder is None:
                # Without a place for this one, there is none for older ones.
                has_room = has_room and self._has_room(found, uid)
                if not has_room:
                    why = f"{self._limits.pods} pods are served already"
                    self._complaints.make("too_many_pods", uid, why)
                    continue
                ranks = self._pods / uid / rendezvous.RANKS
                table = RingTable(ranks, self._reject, 0.0, self._count, uid)
                inboxes = Directory(self._folder.inbox) / PODS
                folder = PodFolder(uid, self._pods, inboxes, table)
            with self._apart(uid):
                folder.hold(self._folder.version)
                self._folders[uid] = folder

    def _has_room(self, found: Mapping[str, os.stat_result], uid: str) -> bool:
        """Return whether one more can be served, if need be in place of an older, empty one.

        A pod cannot date its folder's last change later than now.
        """
        if len(self._folders) < self._limits.pods:
            return True
        without = [uid for uid, folder in self._folders.items() if not folder.table.open]
        oldest = min(without, key=lambda uid: found[uid].st_ctime, default=None)
        if oldest is None or found[oldest].st_ctime >= found[uid].st_ctime:
            return False
        self._folders.pop(oldest).release()
        return True

    def _keep_young(self, pods_fd: int, found: Mapping[str, os.stat_result], now: float) -> None:
        """Renew the times of folders in use: by age they are served first, and removed."""
        for uid, folder in self._folders.items():
            is_used = folder.table.open and uid in found
            if is_used and now - found[uid].st_ctime >= TOUCH_AFTER_S:
                with contextlib.suppress(OSError):
                    os.utime(uid, dir_fd=pods_fd, follow_symlinks=False)

    def _idle(self, found: Mapping[str, os.stat_result], now: float) -> frozenset[str]:
        limit_s = UNSERVED_IDLE_S if len(self._folders) >= self._limits.pods else IDLE_S
        unserved = found.keys() - self._folders.keys()
        return frozenset(uid for uid in unserved if now - found[uid].st_ctime >= limit_s)

    @contextlib.contextmanager
    def _apart(self, uid: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._complaints.make("pod_unusable", uid, f"{type(error).__name__}: {error}")


def listed(folder_fd: int) -> dict[str, os.stat_result]:
    """Return the folders named by a pod's UID."""
    found: dict[str, os.stat_result] = {}
    with os.scandir(folder_fd) as entries:
        for entry in itertools.islice(entries, MAX_LISTED):
            with contextlib.suppress(OSError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISDIR(status.st_mode) and _UID.fullmatch(entry.name):
                    found[entry.name] = status
    return found
