"""Keeps positions and counts of ranks over a restart of the daemon, in its own folder.

Position and counts are saved together, so a daemon that is killed at any time reads again what it
had read after the last save and counts it once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from warpwatch_daemon.ranks.counts import SavedCounts
from warpwatch_runtime.state_file import StateFile
from warpwatch_telemetry.jobs import JobId

logger = logging.getLogger(__name__)

FILE = "positions.json"
VERSION = 1
# 1,024 rings with 64 phases each.
MAX_BYTES = 64 << 20

# The pod whose folder a ring lies in, None for the folder of all, and the ring's name.
Key = tuple[str | None, str]


class SavedRank(SavedCounts, frozen=True, kw_only=True):
    """A rank as it was saved, with the position in its ring. ``left``: it continues in another."""

    pod: str | None
    ring: str
    left: bool = False
    position: int = 0
    owner: str = ""
    job: str = ""
    run: str = ""
    ended: bool = False
    ended_at: float | None = None
    first_time: float = 0.0

    @property
    def key(self) -> Key:
        return self.pod, self.ring

    @property
    def job_id(self) -> JobId:
        return JobId(self.owner, self.job, self.run)


class _Content(msgspec.Struct, frozen=True):
    version: int
    ranks: tuple[SavedRank, ...]


class Positions:
    """The saved ranks: the pipeline calls ``put``, which waits for no disk, a loop ``write``.

    ``fail``: called if there is no space. ``wake``: called if there is something to write.
    """

    def __init__(
        self,
        folder: Path,
        fail: Callable[[], None] = lambda: None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        # Rings do not survive a power cut either.
        self._file: StateFile[_Content] = StateFile(folder / FILE, _Content, MAX_BYTES)
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

    def load(self) -> dict[Key, SavedRank]:
        """Return the saved ranks; counts start again if there are none."""
        content = self._file.read()
        if content is None or content.version != VERSION:
            return {}
        return {saved.key: saved for saved in content.ranks}

    def put(self, ranks: Iterable[SavedRank]) -> int:
        """Replace what is saved unless it is the same; return the number of this content."""
        body = self._file.encode(_Content(VERSION, tuple(ranks)))
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
                self._file.write(body)
            except OSError as error:
                self._fail()
                logger.warning("cannot save positions: %s", error)
                return
            with self._lock:
                self.written = number
                if self._puts == number:
                    self._waiting = None
