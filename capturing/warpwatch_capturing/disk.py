"""How much room a file system has, measured apart from those who decide by it."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from warpwatch_telemetry.errors import Refused

# Some rounds of the loop that measures it (agent.capturing): the file system hangs.
MAX_AGE_S = 60.0


class Room(NamedTuple):
    """In bytes."""

    total: int
    free: int


class Disk:
    """``measure`` waits for the file system and has a loop of its own; ``room`` touches no file."""

    def __init__(self, path: Path, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._monotonic = monotonic
        self.measure()

    def measure(self) -> None:
        found: Room | str
        try:
            found = self._read()
        except OSError as error:
            found = str(error.strerror)
        self._measured = (self._monotonic(), found)

    def _read(self) -> Room:
        usage = shutil.disk_usage(self.path)
        return Room(usage.total, usage.free)

    def room(self) -> Room:
        """As measured last. Raises Refused where that failed, or is too long ago."""
        at, found = self._measured
        age_s = self._monotonic() - at
        if isinstance(found, str):
            raise Refused("refused_disk", f"{self.path}: {found}")
        if age_s > MAX_AGE_S:
            raise Refused("refused_disk", f"{self.path} has not answered for {age_s:.0f} s")
        return found
