"""Captures of kind stacks: where every thread is, read by the helper thread."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from types import FrameType
from typing import Any

MAX_THREADS = 256
MAX_FRAMES = 128


def snapshot(job: str, rank: int) -> dict[str, Any]:
    """All threads with their frames, innermost last. ``time`` is wall clock in seconds."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main = threading.main_thread().ident
    threads = [
        {
            "name": names.get(ident, ""),
            "ident": ident,
            "main": ident == main,
            "frames": _frames(frame),
        }
        for ident, frame in list(sys._current_frames().items())[:MAX_THREADS]
    ]
    return {"rank": rank, "job": job, "time": time.time(), "via": "helper", "threads": threads}


def write(fd: int, snapshot: dict[str, Any]) -> None:
    with os.fdopen(os.dup(fd), "w", encoding="utf-8") as file:
        json.dump(snapshot, file)


def _frames(frame: FrameType | None) -> list[dict[str, Any]]:
    """The innermost MAX_FRAMES frames, innermost last."""
    frames: list[dict[str, Any]] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        code = frame.f_code
        frames.append({"file": code.co_filename, "line": frame.f_lineno, "function": code.co_name})
        frame = frame.f_back
    frames.reverse()
    return frames
