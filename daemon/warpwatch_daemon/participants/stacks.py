"""Stacks of a rank that does not answer: by py-spy, else from its pipe, else why not.

py-spy (optional: the extra ``pyspy``) needs the right to read another process's memory (ptrace
scope), and its PID to mean the same here.

The pipe is one that a process holds ready, for faulthandler to write into when nothing else can. It
is full, so that nothing is written before it is read here. It belongs to the process: it is removed
only after the process has exited, and its content is untrusted.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import select
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from warpwatch import protocol
from warpwatch_daemon.ranks import claims
from warpwatch_daemon.ranks.rank import HOLDS_GIL, STOPPED, UNKNOWN, Rank, silent_reason
from warpwatch_runtime import files
from warpwatch_runtime.directory import Directory, open_checked
from warpwatch_telemetry.errors import WarpwatchError

MAX_THREADS = 256
MAX_FRAMES = 128

# --- py-spy ---

PY_SPY_TIMEOUT_S = 5.0
MAX_PRINTED_BYTES = 16 << 20
MISSING = "py-spy is not installed beside the daemon: install the extra warpwatch[pyspy]"


class PySpyError(WarpwatchError):
    """Raised with the reason if py-spy is not installed or returned nothing."""


def find_py_spy() -> str | None:
    """Return the path of py-spy: next to this Python, else on the PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def run_py_spy(pid: int, timeout_s: float = PY_SPY_TIMEOUT_S) -> list[dict[str, Any]]:
    """Return the threads of a process as in a stacks file. Raises PySpyError."""
    program = find_py_spy()
    if program is None:
        raise PySpyError(MISSING)
    command = [program, "dump", "--json", "--nonblocking", "--pid", str(pid)]
    with tempfile.TemporaryFile() as out:
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                timeout=timeout_s,
            )
        except subprocess.TimeoutExpired as error:
            raise PySpyError("py-spy takes too long") from error
        except OSError as error:
            raise PySpyError(f"py-spy: {error.strerror}") from error
        out.seek(0)
        data = out.read(MAX_PRINTED_BYTES + 1)
    if done.returncode != 0 or len(data) > MAX_PRINTED_BYTES:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise PySpyError(f"py-spy: {claims.clean(lines[0]) if lines else 'no readable answer'}")
    threads = parse_py_spy(data, pid)
    if not threads:
        raise PySpyError("py-spy found no Python frames")
    return threads


def parse_py_spy(data: bytes, pid: int) -> list[dict[str, Any]]:
    """Convert py-spy's JSON to the threads of a stacks file; ``gil`` marks the GIL's holder."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return []
    threads = [_thread(thread, pid) for thread in _objects(found)[:MAX_THREADS]]
    return [thread for thread in threads if thread["frames"]]


def _thread(thread: dict[str, Any], pid: int) -> dict[str, Any]:
    frames = _objects(thread.get("frames"))
    return {
        "name": claims.clean(str(thread.get("thread_name") or "")),
        "ident": thread.get("thread_id"),
        "main": thread.get("os_thread_id") == pid,
        "gil": thread.get("owns_gil") is True,
        "frames": [
            {
                "file": str(frame.get("filename", "")),
                "line": frame.get("line") or 0,
                "function": str(frame.get("name", "")),
            }
            for frame in reversed(frames[:MAX_FRAMES])
        ],
    }


def _objects(found: Any) -> list[dict[str, Any]]:
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


# --- the pipe ---

MAX_PIPE_BYTES = 4 << 20
# A dump is written in one go.
QUIET_S = 0.5
# The first line of what a timer writes.
DUMP_BEGINS = b"Timeout ("
# "Thread 0x00007f49a58946c0 [name] (most recent call first):"; the name since Python 3.14.
_THREAD = re.compile(
    r"(?:Current thread|Thread) 0x([0-9a-f]{1,16})(?: \[(.{0,64}?)\])? \(most recent call first\):"
)
_FRAME = re.compile(r'  File "(.{0,600})", line (\d{1,9}|\?\?\?) in (.{0,600})')


def pipe_name(ring_name: str) -> str:
    """Return the only name that a process may give its pipe: the inbox is shared."""
    return f"held.{ring_name.removesuffix('.ring')}.stacks.fifo"


def read_pipe(
    inbox: Directory,
    name: str,
    owner_uid: int,
    deadline: float,
    monotonic: Callable[[], float] = time.monotonic,
) -> list[dict[str, Any]]:
    """Empty the pipe and return the threads that are written then.

    ``name`` comes from ``pipe_name``, ``deadline`` is monotonic. Call it only if the process gives
    no sign of life: faulthandler must not read threads that run. Anything but a named pipe of this
    owner is ignored.
    """
    try:
        with inbox.opened() as folder_fd:
            fd = open_checked(folder_fd, name, os.O_RDONLY, partial(_check, owner_uid))
    except OSError:
        return []
    try:
        text = _drain(fd, deadline, monotonic).decode(errors="replace")
    finally:
        os.close(fd)
    head, _, rest = text.lstrip("\n").partition("\n")
    return parse_dump(rest, *_head(head))


def remove_pipe(inbox: Directory, ring_name: str, owner_uid: int) -> None:
    """Remove the pipe of a process that has exited. Other owners' files stay."""
    name = pipe_name(ring_name)
    with contextlib.suppress(OSError), inbox.opened() as folder_fd:
        _check(owner_uid, os.stat(name, dir_fd=folder_fd, follow_symlinks=False))
        os.unlink(name, dir_fd=folder_fd)


def _check(owner_uid: int, found: os.stat_result) -> None:
    if not stat.S_ISFIFO(found.st_mode) or found.st_uid != owner_uid or found.st_nlink != 1:
        raise PermissionError(errno.EPERM, "not a named pipe of this owner")


def _drain(fd: int, deadline: float, monotonic: Callable[[], float]) -> bytes:
    """Read until nothing follows a dump for QUIET_S, or until the deadline."""
    data = bytearray()
    until, begun = deadline, False
    # select() knows no descriptors beyond 1023.
    news = select.poll()
    news.register(fd, select.POLLIN)
    while len(data) < MAX_PIPE_BYTES and monotonic() < deadline + QUIET_S:
        try:
            part = os.read(fd, 1 << 16)
        except BlockingIOError:
            left_s = until - monotonic()
            if left_s <= 0 or not news.poll(1000 * left_s):
                break
            continue
        if not part:
            # No process has it open for writing: the process has exited.
            break
        data += part
        begun = begun or DUMP_BEGINS in data
        if begun:
            until = monotonic() + QUIET_S
    return bytes(data)


def _head(line: str) -> tuple[dict[int, str], int | None]:
    """Return (names by ident, ident of the main thread); ({}, None) if the line is malformed."""
    try:
        head = json.loads(line)
    except (ValueError, RecursionError):
        head = None
    if not isinstance(head, dict):
        return {}, None
    named, main = head.get("threads"), head.get("main")
    names = {
        int(ident): claims.clean(name)
        for ident, name in (named.items() if isinstance(named, dict) else ())
        if isinstance(name, str) and ident.isascii() and ident.isdigit() and len(ident) <= 20
    }
    return names, main if isinstance(main, int) else None


def parse_dump(text: str, names: Mapping[int, str], main: int | None) -> list[dict[str, Any]]:
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


# --- both ---

# A rank without a heartbeat is given this long to answer by itself.
ANSWER_S = 3.0
# faulthandler writes 15 s after the last heartbeat; a rank is checked 5 s after it or later.
WAIT_S = 11.0
# The heart beats every 0.5 s: a step that starts this long after a beat was not blocked by the GIL.
TRAINS_NS = 2_000_000_000
_REASONS = {
    STOPPED: "the process is stopped",
    HOLDS_GIL: "a C call holds the GIL",
    UNKNOWN: "the process does not respond",
}


class NoStacks(WarpwatchError):
    """Raised with the reason if there are no stacks."""


@dataclass(frozen=True, slots=True)
class Silent:
    """A rank without a heartbeat. reason: STOPPED, HOLDS_GIL or UNKNOWN."""

    job: str
    rank: int
    pid: int
    reason: str
    held_file: str | None
    owner_uid: int


def inspect(rank: Rank, ring_name: str) -> Silent:
    """Return the state of a silent rank. Raises NoStacks if its process has exited."""
    ring = rank.ring
    if not rank.live:
        raise NoStacks("the process is gone")
    try:
        header, holder_pid = ring.reader.header(), ring.reader.holder_pid()
    except (OSError, protocol.ProtocolError) as error:
        raise NoStacks("its ring cannot be read") from error
    claimed, expected = rank.claims.held_stacks, pipe_name(ring_name)
    # Only for threads that stand still: a rank that steps without a heartbeat has a helper thread
    # that is stuck, and its stacks are not read while it runs.
    trains = header.step_begun_ns - header.heartbeat_ns > TRAINS_NS
    return Silent(
        job=rank.job.name,
        rank=rank.rank,
        pid=header.identity.pid,
        reason=silent_reason(header.identity, holder_pid, rank.owner_uid),
        held_file=expected if claimed == expected and not trains else None,
        owner_uid=rank.owner_uid,
    )


def write_stacks(
    silent: Silent,
    inbox: Directory,
    target: Path,
    deadline: float,
    read: Callable[[int, float], list[dict[str, Any]]] = run_py_spy,
    monotonic: Callable[[], float] = time.monotonic,
) -> str:
    """Write the stacks to ``target``; return the way they were read. Blocks until ``deadline``.

    deadline: monotonic, in seconds. Raises NoStacks, or OSError when the store is full.
    """
    trouble = "its process is not visible here"
    via, threads = "py-spy", list[dict[str, Any]]()
    if silent.reason != UNKNOWN:
        try:
            threads = read(silent.pid, min(PY_SPY_TIMEOUT_S, deadline - monotonic()))
        except PySpyError as error:
            trouble = str(error)
    # A stopped process's timer would end when its threads run again.
    if not threads and silent.held_file is not None and silent.reason == HOLDS_GIL:
        via = "faulthandler"
        threads = read_pipe(inbox, silent.held_file, silent.owner_uid, deadline, monotonic)
        trouble = f"{trouble}; faulthandler wrote none"
    if not threads:
        raise NoStacks(f"{_REASONS[silent.reason]}: no stacks ({trouble})")
    content = {
        "rank": silent.rank,
        "job": silent.job,
        "time": time.time(),
        "via": via,
        "silent_reason": silent.reason,
        "threads": threads,
    }
    files.write(target, json.dumps(content).encode())
    return via
