"""Open files that may be closed behind our back: programs that become daemons close all they see.

The number may belong to another file by then. Before one is closed, or what it says is believed,
compare it with what was opened.
"""

from __future__ import annotations

import os
from contextlib import suppress


class Descriptor:
    """An open file as it was when it was opened."""

    __slots__ = ("_identity", "fd")

    def __init__(self, fd: int) -> None:
        self.fd = fd
        status = os.fstat(fd)
        self._identity = (status.st_dev, status.st_ino)

    def links(self) -> int | None:
        """How many names the file has; None when the descriptor is not ours any more."""
        try:
            status = os.fstat(self.fd)
        except OSError:
            return None
        same = (status.st_dev, status.st_ino) == self._identity
        return status.st_nlink if same else None

    def close(self) -> None:
        """Close it if it is still ours."""
        if self.links() is not None:
            with suppress(OSError):
                os.close(self.fd)
