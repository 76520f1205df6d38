"""How many files there are in folders that others write to, how large, and whose."""

from __future__ import annotations

import contextlib
import os
import stat
from collections import defaultdict
from dataclasses import dataclass

from warpwatch_runtime.directory import FOLDER_FLAGS, Directory
from warpwatch_telemetry.jobs import Owner

# The protocol has one level of folders; what is deeper is not looked at.
MAX_DEPTH = 4


@dataclass(slots=True)
class Usage:
    """Bytes are those on the disk. is_hidden: there are folders that cannot be looked into."""

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
    """Of several folders together. ``owner`` None: each file's user.

    ``by_owner`` has what was found.
    """

    def __init__(self, owner: Owner | None) -> None:
        self.by_owner: defaultdict[Owner, Usage] = defaultdict(Usage)
        self._owner = owner
        self._left = 0

    def add(
        self, folder: Directory, limit: int, *, is_inbox: bool = False, without: str = ""
    ) -> None:
        """``limit``: files that are looked at; ``without``: the name of what is not."""
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
        """Whether it could be looked into, which its owner may prevent in many ways."""
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
