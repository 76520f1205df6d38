"""Stacks read from outside by py-spy, also of a stopped process. Optional: the extra ``pyspy``.

It needs the right to read another process's memory (ptrace scope), and its PID to mean the same
here.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from warpwatch_daemon.ranks import claims
from warpwatch_telemetry.errors import WarpwatchError

TIMEOUT_S = 5.0
MAX_BYTES = 16 << 20
MAX_THREADS = 256
MAX_FRAMES = 128
MISSING = "py-spy is not installed beside the daemon: install the extra warpwatch[pyspy]"


class PySpyError(WarpwatchError):
    """Raised with the reason if py-spy is not installed or returned nothing."""


def find() -> str | None:
    """Return the path of py-spy: next to this Python, else on the PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def dump(pid: int, timeout_s: float = TIMEOUT_S) -> list[dict[str, Any]]:
    """Return the threads of a process as in a stacks file. Raises PySpyError."""
    program = find()
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
        data = out.read(MAX_BYTES + 1)
    if done.returncode != 0 or len(data) > MAX_BYTES:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise PySpyError(f"py-spy: {claims.clean(lines[0]) if lines else 'no readable answer'}")
    threads = parse(data, pid)
    if not threads:
        raise PySpyError("py-spy found no Python frames")
    return threads


def parse(data: bytes, pid: int) -> list[dict[str, Any]]:
    """Convert py-spy's JSON to the threads of a stacks file; ``gil`` marks the GIL's holder."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return []
    listed = [t for t in found if isinstance(t, dict)] if isinstance(found, list) else []
    threads = [_thread(thread, pid) for thread in listed[:MAX_THREADS]]
    return [thread for thread in threads if thread["frames"]]


def _thread(thread: dict[str, Any], pid: int) -> dict[str, Any]:
    listed = thread.get("frames")
    frames = [f for f in listed if isinstance(f, dict)] if isinstance(listed, list) else []
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
