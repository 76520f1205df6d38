"""The pipe that a process holds ready, and what py-spy prints, up to the stacks file of both."""

import itertools
import json
import os
from pathlib import Path
from typing import Any

from tests.fuzz.watch import Target, json_tokens
from warpwatch_daemon.participants import stacks
from warpwatch_daemon.participants.stacks import NoStacks, Silent
from warpwatch_daemon.ranks.rank import HOLDS_GIL
from warpwatch_diagnosis.stacks import read_stack
from warpwatch_diagnosis.trace.files import TraceError
from warpwatch_runtime.directory import Directory

NAME = "held.job-r3-0123.stacks.fifo"
PID = 4711
# The first byte of an input: where the rest is written.
PIPE, PY_SPY = b"\0", b"\1"
HEAD = b'{"rank": 3, "job": "j", "main": 16, "threads": {"16": "MainThread"}}\n'
DUMP = b"""Timeout (0:00:15)!
Thread 0x000000000000001f [worker] (most recent call first):
  File "/usr/lib/python3.14/threading.py", line 5 in wait

Thread 0x0000000000000010 (most recent call first):
  File "/home/me/tr\\xe4in.py", line 12 in hold
  File "/home/me/train.py", line ??? in <module>
"""
PRINTED = [
    {
        "pid": PID,
        "thread_id": 140,
        "thread_name": "MainThread",
        "os_thread_id": PID,
        "active": True,
        "owns_gil": True,
        "frames": [{"name": "f", "filename": "/a.py", "module": None, "line": 3, "locals": None}],
    }
]


def target(folder: Path) -> Target:
    os.mkfifo(folder / NAME, 0o600)
    fd = os.open(folder / NAME, os.O_RDWR | os.O_NONBLOCK)
    inbox, file = Directory(folder), folder / "rank3.stacks.json"
    silent = Silent("j", 3, PID, HOLDS_GIL, NAME, os.getuid())

    def run(data: bytes) -> None:
        def read(pid: int, timeout_s: float) -> list[dict[str, Any]]:
            if data[:1] == PY_SPY:
                return stacks.parse_py_spy(data[1:], PID)
            raise stacks.PySpyError(stacks.MISSING)

        # The pipe is looked at once: nothing follows.
        seconds = itertools.count(0, stacks.QUIET_S / 1.9).__next__
        if data[:1] != PY_SPY:
            os.write(fd, data[1:])
        try:
            stacks.write_stacks(silent, inbox, file, 0.0, read=read, monotonic=seconds)
        except NoStacks as error:
            assert "\n" not in str(error)
            return
        written = json.loads(file.read_text())
        assert len(written["threads"]) <= stacks.MAX_THREADS
        try:
            read_stack(file)
        except TraceError as error:
            assert "no frames of a main thread" in str(error)

    threads = json.dumps(PRINTED).encode()
    seeds = [PIPE + HEAD + DUMP, PIPE + b"\n" * 9 + HEAD + DUMP, PIPE + DUMP, PY_SPY + threads]
    words = b'"threads": "frames": "line": "thread_id":'
    printed = (b"Timeout (", b"Thread 0x", b" (most recent call first):\n", b'  File "')
    tokens = (*json_tokens(words), *printed, b'", line 1 in f\n')
    return Target(run, seeds, tokens)
