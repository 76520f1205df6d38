"""Positions and counts that survive a restart of the daemon, in its own folder.

Position and counts are saved together, so a daemon that is killed at any time reads again what it
had read after the last save and counts it once.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from warpwatch_daemon.ranks.rank import Rank
from warpwatch_runtime import files

logger = logging.getLogger(__name__)

FILE = "positions.json"
VERSION = 1

# A ring by the pod whose folder it lies in, None in the folder of all, and its name.
Key = tuple[str | None, str]


class Positions:
    """``put`` is the pipeline's and waits for no disk, ``write`` is a loop's.

    ``fail``: called when there is no space. ``wake``: called when there is something to write.
    """

    def __init__(
        self,
        folder: Path,
        fail: Callable[[], None] = lambda: None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._path = folder / FILE
        self._fail = fail
        self._wake = wake
        # Between the pipeline and the loop.
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._newest = b""
        self._waiting: bytes | None = None
        self._puts = 0
        # Every ``put`` up to this number is on disk.
        self.written = 0

    def load(self) -> dict[Key, dict[str, Any]]:
        """What was saved, by ring; empty when there is nothing usable."""
        return _load(self._path)

    def put(self, ranks: Iterable[Rank], others: Iterable[dict[str, Any]] = ()) -> int:
        """To be saved in place of what was, unless it is the same; its number.

        ``others``: entries of no such rank.
        """
        content = {"version": VERSION, "ranks": [*(rank.save() for rank in ranks), *others]}
        body = json.dumps(content, separators=(",", ":")).encode()
        with self._lock:
            if body != self._newest:
                self._newest = self._waiting = body
                self._puts += 1
            is_waiting, number = self._waiting is not None, self._puts
        if is_waiting:
            self._wake()
        return number

    def write(self) -> None:
        with self._writing:
            with self._lock:
                body, number = self._waiting, self._puts
            if body is None:
                return
            try:
                # Rings do not outlive the machine's power either.
                files.write(self._path, body, durable=False)
            except OSError as error:
                self._fail()
                logger.warning("cannot save positions: %s", error)
                return
            with self._lock:
                self.written = number
                if self._puts == number:
                    self._waiting = None


def _load(path: Path) -> dict[Key, dict[str, Any]]:
    try:
        content = json.loads(path.read_bytes())
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}")
        return {(entry["pod"], str(entry["ring"])): entry for entry in content["ranks"]}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.warning("cannot use %s, counts start again: %s", path, error)
        return {}
