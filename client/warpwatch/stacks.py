"""Captures of kind stacks: where every thread is, read by the helper thread."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType
from typing import Any

from warpwatch import faults, flight_recorder

MAX_THREADS = 256
MAX_FRAMES = 128
MAX_NAME = 64
# What enters a context manager in the interpreters from 3.9 on.
_ENTERS = ("BEFORE_WITH", "SETUP_WITH")
_NAMES = ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME")


def snapshot(job: str, rank: int) -> dict[str, Any]:
    """All threads with their frames, innermost last. ``time`` is wall clock in seconds.

    ``collectives``: what torch's Flight Recorder knows, where there is one.
    """
    names = thread_names()
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
    found = {"rank": rank, "job": job, "time": time.time(), "via": "helper", "threads": threads}
    collectives = flight_recorder.read()
    return found if collectives is None else {**found, "collectives": collectives}


def thread_names() -> dict[int, str]:
    """Names by ident, without the lock of threading.enumerate, which a hung thread may hold."""
    active: dict[int, threading.Thread] = getattr(threading, "_active", {})
    known = list(active.items())[:MAX_THREADS]
    return {ident: str(thread.name)[:MAX_NAME] for ident, thread in known}


def _frames(frame: FrameType | None) -> list[dict[str, Any]]:
    """The innermost MAX_FRAMES frames, innermost last; that one with what it ``calls``."""
    innermost = frame
    frames: list[dict[str, Any]] = []
    while frame is not None and len(frames) < MAX_FRAMES:
        code = frame.f_code
        frames.append({"file": code.co_filename, "line": frame.f_lineno, "function": code.co_name})
        frame = frame.f_back
    frames.reverse()
    called = None if innermost is None else _called(innermost)
    if called:
        frames[-1]["calls"] = called
    return frames


def _called(frame: FrameType) -> str | None:
    """The name of the C function that the innermost frame is in: ``acquire``, ``__enter__``.

    Read from its instructions: a frame of Python says nothing of a lock that it waits for.
    """
    try:
        import dis

        name = None
        for instruction in dis.get_instructions(frame.f_code):
            if instruction.offset > frame.f_lasti:
                return None
            if instruction.opname in _NAMES:
                name = str(instruction.argval)[:MAX_NAME]
            elif instruction.opname == "LOAD_SPECIAL":
                name = instruction.argrepr
            if instruction.offset == frame.f_lasti:
                if instruction.opname in _ENTERS:
                    return "__enter__"
                return name if instruction.opname.startswith("CALL") else None
    except Exception as error:
        faults.swallow(error)
    return None
