"""The capture store: ``<store>/<YYYY>/<MM>/<DD>/<capture-id>/`` with retention."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import msgspec

from warpwatch.rendezvous import take_lock
from warpwatch_daemon import files
from warpwatch_daemon.config.sections import StoreConfig
from warpwatch_telemetry.captures import Capture
from warpwatch_telemetry.errors import UsageError

logger = logging.getLogger(__name__)

RECORD = "capture.json"
SCHEMA = 1
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC


class Store:
    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self.path = store_path(config)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            files.write(probe, b"")
            probe.unlink()
        except OSError as error:
            # A full store is not fatal: captures are refused until there is space again.
            if not self.path.is_dir() or not os.access(self.path, os.W_OK):
                raise UsageError(
                    f"cannot write captures to {self.path}: {error.strerror}; set store.url"
                ) from error
            logger.warning("the capture store %s: %s", self.path, error.strerror)
        self._lock_fd = self._lock()

    def _lock(self) -> int:
        """A second daemon on the store would take this one's captures for its own."""
        try:
            fd = os.open(self.path / ".lock", _LOCK, 0o600)
        except OSError:
            return -1
        if not take_lock(fd):
            os.close(fd)
            raise UsageError(f"{self.path} is another daemon's capture store; set store.url")
        return fd

    def folder(self, capture_id: str, now: float) -> Path:
        """Where a capture of this time lies, whether there is such a folder or not."""
        return self.path / time.strftime("%Y/%m/%d", time.gmtime(now)) / capture_id

    def create(self, capture: Capture) -> None:
        """Make the capture's folder with its capture.json. Raises OSError when there is no space.

        Retention then knows of it, whenever this daemon may be killed.
        """
        # Where the store's disk is no longer mounted, none is made in its place.
        os.stat(self.path)
        Path(str(capture.folder)).mkdir(parents=True, exist_ok=True)
        self.save(capture)

    def save(self, capture: Capture) -> None:
        """Write capture.json in one go. Raises OSError when there is no space."""
        path = Path(str(capture.folder)) / RECORD
        content = {"schema": SCHEMA, **asdict(capture)}
        del content["folder"], content["diagnosis"]
        files.write(path, json.dumps(content, indent=1).encode(), durable=True)

    def load(self, with_diagnosis: int) -> list[Capture]:
        """The stored captures, oldest first; unreadable ones are passed over and logged.

        Only the newest ``with_diagnosis`` of them get their diagnosis: it takes memory.
        """
        found = []
        for path in sorted(self.path.glob(f"[0-9]*/[0-9]*/[0-9]*/*/{RECORD}")):
            try:
                found.append(_parse(path))
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                logger.warning("cannot read %s: %s", path, error)
        found.sort(key=lambda capture: capture.time)
        older, newest = found[:-with_diagnosis], found[-with_diagnosis:]
        return older + [replace(c, diagnosis=read_diagnosis(Path(str(c.folder)))) for c in newest]

    def retain(
        self, captures: list[Capture], now: float, last: Collection[str] = ()
    ) -> tuple[list[Capture], int]:
        """Remove the oldest beyond age, count and bytes: (those that stay, their bytes).

        ``last``: ids of those that go after all others, but for their age.
        """
        kept: list[Capture] = []
        total = 0
        newest_first = sorted(captures, key=lambda capture: capture.time, reverse=True)
        spared = [capture for capture in newest_first[1:] if capture.id in last]
        others = [capture for capture in newest_first[1:] if capture.id not in last]
        for capture in [*newest_first[:1], *spared, *others]:
            if capture.outcome is None or capture.folder is None:
                kept.append(capture)
                continue
            size = _size(Path(capture.folder))
            old = now - capture.time > self.config.max_age
            full = total + size > self.config.max_bytes or len(kept) >= self.config.max_captures
            # The newest stays even when it alone is over the quota: it was just asked for.
            if old or (full and kept):
                shutil.rmtree(capture.folder, ignore_errors=True)
                logger.info("removed capture %s (%d bytes): retention", capture.id, size)
                continue
            total += size
            kept.append(capture)
        kept.sort(key=lambda capture: capture.time)
        return kept, total


def store_path(config: StoreConfig) -> Path:
    return Path(unquote(urlparse(config.url).path))


def read_diagnosis(folder: Path) -> Mapping[str, Any] | None:
    try:
        content = json.loads((folder / "diagnosis.json").read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _parse(path: Path) -> Capture:
    content = json.loads(path.read_bytes())
    if content.pop("schema") != SCHEMA:
        raise ValueError("another schema")
    # What another version saved besides is passed over.
    capture = msgspec.convert(content, Capture)
    return replace(capture, folder=str(path.parent))


def _size(folder: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    except OSError:
        return 0
