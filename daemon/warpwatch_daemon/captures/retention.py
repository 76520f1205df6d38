"""What the capture store keeps: nothing too old, and no more than its bytes and its count.

Who has the most gives way: one owner's large captures remove no other's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from warpwatch_daemon.config.sections import StoreConfig
from warpwatch_telemetry.captures import Capture

logger = logging.getLogger(__name__)

# A folder without a byte that is no capture's is not kept for long.
EMPTY_AFTER_S = 3600.0


@dataclass(frozen=True, slots=True)
class Stored:
    """A folder of the store; ``capture`` is None where a power cut left no record of one."""

    path: Path
    time: float
    size: int
    capture: Capture | None = None

    @property
    def owner(self) -> str:
        return "" if self.capture is None else self.capture.request.owner

    def max_age(self, config: StoreConfig) -> float:
        return EMPTY_AFTER_S if self.capture is None and not self.size else config.max_age


def orphan(path: Path, now: float) -> Stored:
    try:
        changed = path.lstat().st_mtime
    except OSError:
        changed = now
    return Stored(path, min(changed, now), size_of(path))


def keep(
    stored: Sequence[Stored],
    running: Sequence[Stored],
    last: Collection[str],
    config: StoreConfig,
    now: float,
) -> list[Stored]:
    """Remove what is too old or too much; what stays.

    running: what may not go, and takes its part. last: ids of captures that go after all others
    of their owner, but for their age; the newest of all goes after these: it was just asked for.
    Before all others of an owner go those that the remote store has.
    """
    rest = [one for one in stored if now - one.time <= one.max_age(config) or not _removed(one)]
    used = sum(one.size for one in running)
    captured = [one for one in (*rest, *running) if one.capture is not None]
    newest = max(captured, key=lambda one: one.time, default=None)
    # The first of each owner goes first.
    owners: dict[str, list[Stored]] = defaultdict(list)
    for one in sorted(rest, key=lambda one: _precedence(one, last, newest)):
        owners[one.owner].append(one)
    kept: list[Stored] = []
    while owners:
        left = [one for of_owner in owners.values() for one in of_owner] + kept
        too_large = used + sum(one.size for one in left) > config.max_bytes
        if not too_large and len(running) + len(left) <= config.max_captures:
            return left
        most = max(owners.values(), key=lambda some: _taken(some, by_bytes=too_large))
        one = most.pop(0)
        if not most:
            del owners[one.owner]
        if (one is newest and not owners) or not _removed(one):
            kept.append(one)
    return kept


def size_of(folder: Path) -> int:
    """Bytes of all files in it, at any depth."""
    size = 0
    for above, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(above, name)).st_size
    return size


def _precedence(
    one: Stored, last: Collection[str], newest: Stored | None
) -> tuple[bool, bool, bool, float]:
    is_last = one.capture is not None and one.capture.id in last
    is_only = one.capture is not None and one.capture.remote is None
    return (one is newest, is_last, is_only, one.time)


def _taken(some: Sequence[Stored], *, by_bytes: bool) -> int:
    return sum(one.size for one in some) if by_bytes else len(some)


def _removed(stored: Stored) -> bool:
    shutil.rmtree(stored.path, ignore_errors=True)
    if stored.path.exists():
        return False
    logger.info("removed %s (%d bytes): retention", stored.path.name, stored.size)
    return True
