"""The command file: written in place by the daemon alone, read by one process."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

from warpwatch import protocol
from warpwatch_daemon.ranks.directory import Directory, check_regular, open_checked, open_own

SUFFIX = ".cmd"
MAX_SEQUENCE = (1 << 64) - 1


class CommandFiles:
    def __init__(self, folder: Directory) -> None:
        self._folder = folder

    def prepare(self, ring_name: str) -> None:
        """Make the process's command file, so that the process can open it before the first use.

        Raises OSError.
        """
        with self._folder.opened() as folder_fd:
            fd = open_own(folder_fd, _name(ring_name))
        try:
            if os.fstat(fd).st_size != protocol.COMMAND_SIZE:
                os.ftruncate(fd, 0)
                os.pwrite(fd, protocol.encode_command(0, {}), 0)
        finally:
            os.close(fd)

    def send(self, ring_name: str, command: dict[str, Any]) -> None:
        """Replace the process's command. The sequence number is written last. Raises OSError."""
        with self._folder.opened() as folder_fd:
            fd = open_checked(folder_fd, _name(ring_name), os.O_RDWR, check_regular)
        try:
            offset = protocol.COMMAND_SEQUENCE_OFFSET
            # In a pod's own folder the number before may be anything.
            sequence = int.from_bytes(os.pread(fd, 8, offset), "little") % MAX_SEQUENCE + 1
            data = protocol.encode_command(sequence, command)
            os.pwrite(fd, data[offset + 8 :], offset + 8)
            os.pwrite(fd, data[offset : offset + 8], offset)
        finally:
            os.close(fd)

    def sweep(self, stems: set[str], max_files: int) -> None:
        """Remove the command files of rings that are gone; ``stems``: rings without suffix."""
        with self._folder.opened() as folder_fd, os.scandir(folder_fd) as entries:
            names = [entry.name for entry in itertools.islice(entries, max_files)]
            for name in names:
                if name.endswith(SUFFIX) and name.removesuffix(SUFFIX) not in stems:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=folder_fd)

    def remove(self, ring_name: str) -> None:
        self._folder.unlink(_name(ring_name))


def _name(ring_name: str) -> str:
    return ring_name.removesuffix(".ring") + SUFFIX
