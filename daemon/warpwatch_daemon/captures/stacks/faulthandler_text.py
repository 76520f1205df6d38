"""Tracebacks as faulthandler writes them: text, innermost frame first, ASCII alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

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
    """The threads as in a stacks file, innermost frame last. What is no traceback is passed over.

    names: of threads by ident, for Pythons that do not write them; main: the main thread's ident.
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
