"""The command file: written in place by the daemon alone, read by one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from warpwatch.client import protocol


class CommandFiles:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def prepare(self, ring_name: str) -> None:
        """Make the process's command file, so that the process can open it before the first use."""
        path = self._path(ring_name)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(path, flags, 0o644)
        try:
            os.fchmod(fd, 0o644)
            if os.fstat(fd).st_size != protocol.COMMAND_SIZE:
                os.ftruncate(fd, 0)
                os.pwrite(fd, protocol.encode_command(0, {}), 0)
        finally:
            os.close(fd)

    def send(self, ring_name: str, command: dict[str, Any]) -> None:
        """Replace the process's command. The sequence number is written last."""
        fd = os.open(self._path(ring_name), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            offset = protocol.COMMAND_SEQUENCE_OFFSET
            sequence = int.from_bytes(os.pread(fd, 8, offset), "little") + 1
            data = protocol.encode_command(sequence, command)
            os.pwrite(fd, data[offset + 8 :], offset + 8)
            os.pwrite(fd, data[offset : offset + 8], offset)
        finally:
            os.close(fd)

    def sweep(self, stems: set[str]) -> None:
        """Remove the command files of rings that are gone; ``stems``: rings without suffix."""
        for path in self._folder.glob("*.cmd"):
            if path.stem not in stems:
                path.unlink(missing_ok=True)

    def remove(self, ring_name: str) -> None:
        self._path(ring_name).unlink(missing_ok=True)

    def _path(self, ring_name: str) -> Path:
        return self._folder / (ring_name.removesuffix(".ring") + ".cmd")
