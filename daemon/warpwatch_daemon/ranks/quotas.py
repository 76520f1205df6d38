"""Limits each owner: files and bytes in the rendezvous folder and the inbox, and records per round.

The records of a round are shared among owners, then among the rings of each: small requests are met
in full, and the others share the rest equally.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import random
import stat
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from warpwatch import rendezvous
from warpwatch.protocol import MAX_RING_BYTES, RING_SIZE
from warpwatch_daemon.config import RendezvousConfig
from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.pods import PODS
from warpwatch_daemon.ranks.table import MAX_FILES, MAX_RINGS_PER_OWNER, OpenRing
from warpwatch_runtime.directory import FOLDER_FLAGS, Directory
from warpwatch_telemetry.jobs import Owner

logger = logging.getLogger(__name__)

# The protocol has one level of folders; deeper ones are ignored.
MAX_DEPTH = 4


@dataclass(slots=True)
class Usage:
    """The files of one owner and their bytes on disk. is_hidden: some folders cannot be read."""

    files: int = 0
    folder_bytes: int = 0
    inbox_bytes: int = 0
    is_hidden: bool = False

    def add(self, found: os.stat_result, is_inbox: bool) -> None:
        self.files += 1
        if is_inbox:
            self.inbox_bytes += found.st_blocks * 512
        else:
            self.folder_bytes += found.st_blocks * 512


class Count:
    """The usage of several folders, by ``owner``; None: by each file's user."""

    def __init__(self, owner: Owner | None) -> None:
        self.by_owner: defaultdict[Owner, Usage] = defaultdict(Usage)
        self._owner = owner
        self._left = 0

    def add(
        self, folder: Directory, limit: int, *, is_inbox: bool = False, without: str = ""
    ) -> None:
        """Add at most ``limit`` files of a folder, except the entry named ``without``."""
        self._left = limit
        with contextlib.suppress(OSError), folder.opened() as fd:
            self._add(fd, is_inbox, without, MAX_DEPTH)

    def _add(self, folder_fd: int, is_inbox: bool, without: str, depth: int) -> None:
        with os.scandir(folder_fd) as entries:
            for entry in entries:
                if self._left <= 0:
                    return
                if entry.name == without:
                    continue
                self._left -= 1
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    usage = self.by_owner[found.st_uid if self._owner is None else self._owner]
                    usage.add(found, is_inbox)
                    is_folder = stat.S_ISDIR(found.st_mode)
                    if is_folder and not self._add_below(folder_fd, entry.name, is_inbox, depth):
                        usage.is_hidden = True

    def _add_below(self, folder_fd: int, name: str, is_inbox: bool, depth: int) -> bool:
        """Return whether the folder could be read, which its owner may prevent in many ways."""
        if not depth:
            return False
        try:
            below = os.open(name, FOLDER_FLAGS, dir_fd=folder_fd)
        except FileNotFoundError:
            return True
        except OSError:
            return False
        try:
            self._add(below, is_inbox, "", depth - 1)
        except OSError:
            return False
        finally:
            os.close(below)
        return True


# The rendezvous folder is in memory: allow only as many rings as the daemon reads.
FOLDER_BYTES = MAX_RINGS_PER_OWNER * MAX_RING_BYTES
# Per owner, in both folders together.
OWNER_FILES = 4096
# Time limits per round: to measure all pods, and to evict one owner's files.
MEASURE_LIMIT_S, EVICT_LIMIT_S = 1.0, 0.2


class Quotas:
    """The owners over quota, as of the last ``measure``.

    Call ``measure`` from one loop only; ``excess`` is thread-safe. ``reject`` receives a reason
    if an owner exceeds its quota or if no new ring fits.
    """

    def __init__(
        self,
        folder: RendezvousFolder,
        config: RendezvousConfig,
        reject: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._reject = reject
        self._monotonic = monotonic
        self._run = Directory(folder.path)
        self._inbox = Directory(folder.inbox)
        self._excess: Mapping[Owner, str] = {}
        self._is_full = False

    def excess(self, owner: Owner) -> str | None:
        """Return the quota that the owner exceeds, or None."""
        return self._excess.get(owner)

    def measure(self) -> None:
        """Measure all owners and evict files of those over quota."""
        self._check_free_space()
        excess: dict[Owner, str] = {}
        for owner, usage in self._of_users().items():
            self._enforce(excess, owner, usage, self._inbox)
        pods = list(inbox.pods_in(self._run / PODS, self._inbox / PODS))
        until = self._monotonic() + MEASURE_LIMIT_S
        # The order is random, so that the time limit does not always skip the same pods.
        # A skipped pod keeps its last result.
        for pod in random.sample(pods, len(pods)):
            if self._monotonic() < until:
                self._enforce(excess, pod, self._of_pod(pod), self._inbox / PODS / pod)
            elif pod in self._excess:
                excess[pod] = self._excess[pod]
        for owner in excess.keys() - self._excess.keys():
            self._reject("over_quota")
            name = f"uid {owner}" if isinstance(owner, int) else f"pod {owner}"
            logger.warning("refusing captures of %s, over quota: %s", name, excess[owner])
        self._excess = excess

    def _check_free_space(self) -> None:
        """Report if no new ring fits. Existing rings are preallocated."""
        with contextlib.suppress(OSError):
            found = os.statvfs(self._run.path)
            is_full = found.f_bavail * found.f_frsize < RING_SIZE
            if is_full and not self._is_full:
                self._reject("no_room")
                logger.warning("%s is full: new ranks cannot report", self._run.path)
            self._is_full = is_full

    def _of_users(self) -> Mapping[Owner, Usage]:
        count = Count(None)
        count.add(self._run / rendezvous.RANKS, MAX_FILES)
        count.add(self._inbox, MAX_FILES, is_inbox=True, without=inbox.pods_name(self._inbox))
        return count.by_owner

    def _of_pod(self, pod: str) -> Usage:
        count = Count(pod)
        count.add(self._run / PODS / pod, OWNER_FILES + 1)
        count.add(self._inbox / PODS / pod, MAX_FILES, is_inbox=True)
        return count.by_owner[pod]

    def _enforce(
        self, excess: dict[Owner, str], owner: Owner, usage: Usage, inbox_folder: Directory
    ) -> None:
        what = self._excess_of(usage)
        if what is None:
            return
        excess[owner] = what
        uid = owner if isinstance(owner, int) else None
        with contextlib.suppress(OSError):
            inbox.evict(
                inbox_folder,
                uid,
                usage.inbox_bytes - self._config.owner_bytes,
                usage.files - OWNER_FILES,
                keep="" if uid is None else inbox.pods_name(inbox_folder),
                limit_s=EVICT_LIMIT_S,
                monotonic=self._monotonic,
            )

    def _excess_of(self, usage: Usage) -> str | None:
        size = self._config.owner_bytes
        if usage.is_hidden:
            return "folders that cannot be looked into"
        if usage.files > OWNER_FILES:
            return f"more than {OWNER_FILES} files"
        if usage.folder_bytes > FOLDER_BYTES:
            return f"{_mib(usage.folder_bytes)} in its rendezvous folder of {_mib(FOLDER_BYTES)}"
        if usage.inbox_bytes > size:
            has = _mib(usage.inbox_bytes)
            return f"{has} in its inbox of {_mib(size)} (rendezvous.owner_bytes)"
        return None


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


# All rings together, on average. 1,024 rings at two steps per second write 2,048.
RECORDS_PER_S = 4_000
# At most this many at once after a quiet time: a restarted daemon reads 200 of each rank again.
MAX_SAVED = 12_000
# A new ring gets these even if a flood has spent the budget.
NEW_RING_RECORDS = 16

K = TypeVar("K", bound=Hashable)


class RecordBudget:
    """The records that may be read; ``reject`` gets a reason for each ring with skipped records.

    Times are of the monotonic clock.
    """

    def __init__(self, reject: Callable[[str], None]) -> None:
        self._reject = reject
        self._left = float(MAX_SAVED)
        self._filled_at = math.inf
        # The rings that the log has named.
        self._named: set[OpenRing] = set()

    def share(self, rings: Collection[OpenRing], at: float) -> Mapping[OpenRing, int]:
        """Return for each ring how many of its newest records may be read in this round."""
        earned = max(0.0, at - self._filled_at) * RECORDS_PER_S
        self._left, self._filled_at = min(MAX_SAVED, self._left + earned), at
        self._named.intersection_update(rings)
        owners: dict[Hashable, dict[OpenRing, int]] = defaultdict(dict)
        for ring in rings:
            owners[ring.budget][ring] = ring.reader.peek()
        asked = {owner: sum(unread.values()) for owner, unread in owners.items()}
        granted = fair_shares(asked, int(self._left))
        shares: dict[OpenRing, int] = {}
        for owner, unread in owners.items():
            for ring, share in fair_shares(unread, granted[owner]).items():
                shares[ring] = self._take(ring, unread[ring], share)
        return shares

    def share_of_new(self, ring: OpenRing) -> int:
        """Return the share of a ring that was just opened."""
        unread = ring.reader.peek()
        return self._take(ring, unread, min(unread, max(NEW_RING_RECORDS, int(self._left))))

    def _take(self, ring: OpenRing, unread: int, share: int) -> int:
        self._left = max(0.0, self._left - share)
        if share < unread:
            self._reject("too_many_records")
            if ring not in self._named:
                self._named.add(ring)
                text = "%s of uid %d: more records than are read; its totals are counted"
                logger.warning(text, ring.name, ring.owner_uid)
        return share


def fair_shares(asked: Mapping[K, int], total: int) -> dict[K, int]:
    """Return parts of ``total``: each request, or an equal part of the rest."""
    shares = {}
    for waiting, key in enumerate(sorted(asked, key=lambda key: asked[key])):
        shares[key] = min(asked[key], total // (len(asked) - waiting))
        total -= shares[key]
    return shares
