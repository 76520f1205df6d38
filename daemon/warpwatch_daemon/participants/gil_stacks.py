"""The pipe that a process holds ready, for faulthandler to write into when nothing else can.

It is full, so that nothing is written before it is read here. It belongs to the process: it is
removed only after the process has exited, and its content is untrusted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import stat
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from warpwatch_daemon.ranks import claims
from warpwatch_runtime.directory import Directory, open_checked

MAX_BYTES = 4 << 20
SUFFIX = ".stacks.fifo"
# A dump is written in one go.
QUIET_S = 0.5


def file_name(ring_name: str) -> str:
    """Return the only name that a process may give its pipe: the inbox is shared."""
    return f"held.{ring_name.removesuffix('.ring')}{SUFFIX}"


def read(
    inbox: Directory,
    name: str,
    owner_uid: int,
    deadline: float,
    monotonic: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:
    """Empty the pipe and wait for the threads that are written then; none: an empty list.

    ``name`` comes from ``file_name``, ``deadline`` is monotonic. To be asked for only when the
    process gives no sign of life: faulthandler must not look at threads that run. Anything but a
    named pipe of this owner is ignored.
    """
    fd = _open(inbox, name, owner_uid)
    if fd < 0:
        return []
    try:
        text = _drain(fd, deadline, monotonic).decode(errors="replace")
    finally:
        os.close(fd)
    head, _, rest = text.lstrip("\n").partition("\n")
    names, main = _head(head)
    return parse(rest, names, main)


def remove(inbox: Directory, name: str, owner_uid: int) -> None:
    """Remove the pipe of a process that has left it. Other owners' files stay."""
    with contextlib.suppress(OSError), inbox.opened() as folder_fd:
        _check(owner_uid, os.stat(name, dir_fd=folder_fd, follow_symlinks=False))
        os.unlink(name, dir_fd=folder_fd)


def _open(inbox: Directory, name: str, owner_uid: int) -> int:
    """Open the named pipe, or return -1; never blocks."""
    try:
        with inbox.opened() as folder_fd:
            return open_checked(folder_fd, name, os.O_RDONLY, partial(_check, owner_uid))
    except OSError:
        return -1


def _check(owner_uid: int, found: os.stat_result) -> None:
    if not stat.S_ISFIFO(found.st_mode) or found.st_uid != owner_uid or found.st_nlink != 1:
        raise PermissionError(errno.EPERM, "no named pipe of this owner")


def _drain(fd: int, deadline: float, monotonic: Callable[[], float]) -> bytes:
    """Read until nothing follows a dump for QUIET_S, or until the deadline."""
    data = bytearray()
    until, begun = deadline, False
    # select() knows no descriptors beyond 1023.
    news = select.poll()
    news.register(fd, select.POLLIN)
    while len(data) < MAX_BYTES and monotonic() < deadline + QUIET_S:
        try:
            part = os.read(fd, 1 << 16)
        except BlockingIOError:
            left_s = until - monotonic()
            if left_s <= 0 or not news.poll(1000 * left_s):
                break
            continue
        if not part:
            # No process has it open for writing: the process is gone.
            break
        data += part
        begun = begun or DUMP_BEGINS in data
        if begun:
            until = monotonic() + QUIET_S
    return bytes(data)


def _head(line: str) -> tuple[dict[int, str], int | None]:
    """Return (names by ident, ident of the main thread); ({}, None) if the line is malformed."""
    try:
        said = json.loads(line)
    except (ValueError, RecursionError):
        return {}, None
    if not isinstance(said, dict):
        return {}, None
    named, main = said.get("threads"), said.get("main")
    names = {
        int(ident): claims.clean(name)
        for ident, name in (named.items() if isinstance(named, dict) else ())
        if isinstance(name, str) and ident.isascii() and ident.isdigit() and len(ident) <= 20
    }
    return names, main if isinstance(main, int) else None


# "Thread 0x00007f49a58946c0 [name] (most recent call first):"; the name since Python 3.14.
_THREAD = re.compile(
    r"(?:Current thread|Thread) 0x([0-9a-f]{1,16})(?: \[(.{0,64}?)\])? \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(.{0,600})", line (\d{1,9}|\?\?\?) in (.{0,600})')
# The first line of what a timer writes.
DUMP_BEGINS = b"Timeout ("
MAX_THREADS = 256
MAX_FRAMES = 128


def parse(text: str, names: Mapping[int, str], main: int | None) -> list[dict[str, Any]]:
    """Return the threads as in a stacks file, innermost frame last. Other lines are ignored.

    names: thread names by ident, for Pythons that do not write them; main: the main thread.
    """
    threads: list[dict[str, Any]] = []
    for line in text.splitlines():
        if found := _THREAD.fullmatch(line):
            if len(threads) == MAX_THREADS:
                break
            ident = int(found[1], 16)
            name = names.get(ident) or found[2] or ""
            threads.append({"name": name, "ident": ident, "main": ident == main, "frames": []})
        elif threads and (found := _FRAME.fullmatch(line)):
            frames = threads[-1]["frames"]
            if len(frames) < MAX_FRAMES:
                number = int(found[2]) if found[2].isdigit() else 0
                frames.insert(0, {"file": found[1], "line": number, "function": found[3]})
    return [thread for thread in threads if thread["frames"]]
