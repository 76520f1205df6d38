"""The lock by which shims know that a daemon lives, and a second daemon that it is second."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from warpwatch import rendezvous
from warpwatch.protocol import PROTOCOL_VERSION
from warpwatch_daemon.ranks import claims
from warpwatch_daemon.ranks.directory import open_own
from warpwatch_telemetry.errors import WarpwatchError


class AlreadyHeld(WarpwatchError):
    """Another process holds the lock; the text says who."""


def about(version: str, inbox: Path) -> dict[str, Any]:
    """What the lock's file says of the daemon."""
    return {
        "version": version,
        "uid": os.getuid(),
        "pid": os.getpid(),
        "protocol": PROTOCOL_VERSION,
        "inbox": str(inbox),
    }


def hold(folder_fd: int, content: dict[str, Any]) -> int:
    """The descriptor that holds ``daemon.lock`` until it is closed. Raises AlreadyHeld, OSError."""
    fd = _locked(folder_fd)
    if fd is None:
        # Only readers hold it, as anyone can: take a new file in its place.
        os.unlink(rendezvous.LOCK_FILE, dir_fd=folder_fd)
        fd = _locked(folder_fd)
    if fd is None:
        raise AlreadyHeld("a reader")
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(content).encode(), 0)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _locked(folder_fd: int) -> int | None:
    """The lock's file, locked; None where only readers are in the way."""
    fd = open_own(folder_fd, rendezvous.LOCK_FILE)
    if rendezvous.take_lock(fd):
        return fd
    holder, said = rendezvous.lock_holder(fd), os.pread(fd, 4096, 0)
    os.close(fd)
    if holder is not None:
        raise AlreadyHeld(_describe(said))
    return None


def _describe(content: bytes) -> str:
    """One line; in a pod's own folder the content is the pod's."""
    try:
        said = json.loads(content)
        text = f"warpwatch {said['version']} (pid {said['pid']}, uid {said['uid']})"
        return claims.clean(text)
    except (ValueError, KeyError, TypeError, RecursionError):
        return "another process"
