"""Reads and validates the daemon's commands."""

from __future__ import annotations

import os
import re
from typing import Any, NamedTuple

from warpwatch import protocol

_ID = re.compile(r"[0-9A-Za-z-]{1,40}")
MAX_STEPS = 100
# Additions to a trace, at a cost. Unknown options are ignored.
OPTIONS = ("stacks", "shapes", "memory")


class Command(NamedTuple):
    """A command; ``op`` is capture or cancel. Only captures use the fields after ``id``."""

    op: str
    id: str
    kind: str = ""
    start_step: int = 0
    steps: int = 0
    arm_timeout_s: float = 60.0
    options: tuple[str, ...] = ()


def parse(fields: dict[str, Any]) -> Command | None:
    """Return the command, None if it is invalid; ``kind`` is empty for an invalid capture."""
    identifier = fields.get("id")
    if not isinstance(identifier, str) or not _ID.fullmatch(identifier):
        return None
    if fields.get("op") == "cancel":
        return Command("cancel", identifier)
    if fields.get("op") != "capture":
        return None
    kind, start, steps = fields.get("kind"), fields.get("start_step", 0), fields.get("steps", 1)
    timeout = fields.get("arm_timeout_s", 60)
    whole = type(start) is int and type(steps) is int and 0 < steps <= MAX_STEPS
    timely = type(timeout) in (int, float) and 0 < timeout <= protocol.MAX_ARM_TIMEOUT_S
    if not (isinstance(kind, str) and whole and timely):
        return Command("capture", identifier)
    asked = fields.get("options")
    options = tuple(name for name in OPTIONS if isinstance(asked, list) and name in asked)
    return Command("capture", identifier, kind, start, steps, float(timeout), options)


def read(fd: int) -> tuple[bytes, Command | None] | None:
    """Return (sequence number as 8 bytes, command), or None while the file is being written."""
    data = os.pread(fd, protocol.COMMAND_SIZE, 0)
    try:
        _, fields = protocol.decode_command(data)
    except (ValueError, RecursionError):
        return None
    return data[8:16], parse(fields)


def open_file(folder_fd: int, name: str, owner_uid: int) -> int:
    """Open ``commands/<name>.cmd``; return -1 unless it is a command file of ``owner_uid``."""
    nofollow = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        commands_fd = os.open("commands", nofollow | os.O_DIRECTORY, dir_fd=folder_fd)
    except OSError:
        return -1
    try:
        fd = os.open(f"{name}.cmd", nofollow | os.O_NONBLOCK, dir_fd=commands_fd)
    except OSError:
        return -1
    finally:
        os.close(commands_fd)
    status = os.fstat(fd)
    regular = status.st_mode & 0o170000 == 0o100000
    if regular and status.st_uid == owner_uid and status.st_size == protocol.COMMAND_SIZE:
        return fd
    os.close(fd)
    return -1
