"""How much each owner may lay down in its folder and inbox, and what becomes of who has more.

An owner is a pod with folders of its own, whoever owns the files in them, and in the folders of all
the user of each file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import Callable, Mapping

from warpwatch import rendezvous
from warpwatch.protocol import MAX_RING_BYTES, RING_SIZE
from warpwatch_daemon.config.sections import RendezvousConfig
from warpwatch_daemon.ranks import inbox
from warpwatch_daemon.ranks.folder import RendezvousFolder
from warpwatch_daemon.ranks.inboxes import pods_name
from warpwatch_daemon.ranks.pods import PODS, listed
from warpwatch_daemon.ranks.table import MAX_FILES, MAX_RINGS_PER_OWNER
from warpwatch_daemon.ranks.usage import Count, Usage
from warpwatch_runtime.directory import Directory
from warpwatch_telemetry.jobs import Owner

logger = logging.getLogger(__name__)

# In the rendezvous, which is memory: as many rings as are read.
FOLDER_BYTES = MAX_RINGS_PER_OWNER * MAX_RING_BYTES
# Of an owner, in inbox and rendezvous together.
OWNER_FILES = 4096
# What looking at pods may take of a round, and what removing may take of each owner's inbox.
LOOK_S = 1.0
EVICT_S = 0.2


class Quotas:
    """``measure`` is for one loop, ``excess`` may be asked from any thread.

    ``reject`` gets the reason when an owner comes to have too much, and when there is no room for
    one more ring.
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
        """What this owner has too much of, as it was measured last."""
        return self._excess.get(owner)

    def measure(self) -> None:
        self._look_for_room()
        excess: dict[Owner, str] = {}
        for owner, usage in self._of_users().items():
            self._judge(excess, owner, usage, self._inbox)
        pods = self._pods()
        until = self._monotonic() + LOOK_S
        # In another order each time: who is not reached keeps what was measured of it.
        for pod in random.sample(pods, len(pods)):
            if self._monotonic() < until:
                self._judge(excess, pod, self._of_pod(pod), self._inbox / PODS / pod)
            elif pod in self._excess:
                excess[pod] = self._excess[pod]
        for owner in excess.keys() - self._excess.keys():
            self._reject("over_quota")
            name = f"uid {owner}" if isinstance(owner, int) else f"pod {owner}"
            logger.warning("%s is not captured any more: it has %s", name, excess[owner])
        self._excess = excess

    def _look_for_room(self) -> None:
        """Rings that are there lose nothing: their room was taken when they were made."""
        with contextlib.suppress(OSError):
            found = os.statvfs(self._run.path)
            is_full = found.f_bavail * found.f_frsize < RING_SIZE
            if is_full and not self._is_full:
                self._reject("no_room")
                logger.warning("%s is full: new ranks are not seen", self._run.path)
            self._is_full = is_full

    def _of_users(self) -> Mapping[Owner, Usage]:
        count = Count(None)
        count.add(self._run / rendezvous.RANKS, MAX_FILES)
        count.add(self._inbox, MAX_FILES, is_inbox=True, without=pods_name(self._inbox))
        return count.by_owner

    def _of_pod(self, pod: str) -> Usage:
        count = Count(pod)
        count.add(self._run / PODS / pod, OWNER_FILES + 1)
        count.add(self._inbox / PODS / pod, MAX_FILES, is_inbox=True)
        return count.by_owner[pod]

    def _pods(self) -> list[str]:
        found: set[str] = set()
        for base in (self._run, self._inbox):
            with contextlib.suppress(OSError), (base / PODS).opened() as fd:
                found.update(listed(fd))
        return list(found)

    def _judge(
        self, excess: dict[Owner, str], owner: Owner, usage: Usage, inbox_folder: Directory
    ) -> None:
        """Note what the owner has too much of, and remove of its inbox what is beyond."""
        what = self._excess_of(usage)
        if what is None:
            return
        excess[owner] = what
        too_large = usage.inbox_bytes - self._config.owner_bytes
        too_many = usage.files - OWNER_FILES
        uid = owner if isinstance(owner, int) else None
        keep = pods_name(inbox_folder) if uid is not None else ""
        with contextlib.suppress(OSError):
            inbox.evict(inbox_folder, uid, too_large, too_many, keep, EVICT_S, self._monotonic)

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
