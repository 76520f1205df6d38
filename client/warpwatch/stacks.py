"""Takes captures of kind stacks: the frames of all threads, and torch's unfinished collectives.

The collectives come from torch's Flight Recorder. Its dump takes a lock and, for NCCL, queries CUDA
events; a hang may hold either. It is therefore read by torch's control plane, whose handlers run
without the GIL, in a thread that is abandoned if it does not return.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from types import FrameType
from typing import Any

from warpwatch import faults

MAX_THREADS = 256
MAX_FRAMES = 128
MAX_NAME = 64
# The instructions that enter a context manager in Python 3.9 and newer.
_ENTERS = ("BEFORE_WITH", "SETUP_WITH")
_NAMES = ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL", "LOAD_NAME")


def snapshot(job: str, rank: int) -> dict[str, Any]:
    """Return all threads with their frames, innermost last, and the collectives if available.

    ``time`` is wall clock in seconds.
    """
    names, main = thread_names(), threading.main_thread().ident
    threads = [
        {"name": names.get(i, ""), "ident": i, "main": i == main, "frames": _frames(frame)}
        for i, frame in list(sys._current_frames().items())[:MAX_THREADS]
    ]
    found = {"rank": rank, "job": job, "time": time.time(), "via": "helper", "threads": threads}
    collectives = collectives_in_flight()
    return found if collectives is None else {**found, "collectives": collectives}


def thread_names() -> dict[int, str]:
    """Return names by ident, without threading's lock, which a hung thread may hold."""
    active: dict[int, threading.Thread] = getattr(threading, "_active", {})
    known = list(active.items())[:MAX_THREADS]
    return {ident: str(thread.name)[:MAX_NAME] for ident, thread in known}


def _frames(frame: FrameType | None) -> list[dict[str, Any]]:
    """Return the innermost MAX_FRAMES frames; the last has the C function that it ``calls``."""
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
    """Return the C function that the innermost frame is in, by its instructions: ``acquire``."""
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
                # Python 3.11 calls a C function by PRECALL, once the code has run some times.
                return name if instruction.opname.startswith(("CALL", "PRECALL")) else None
    except Exception as error:
        faults.swallow(error)
    return None


TIMEOUT_S = 1.0
MAX_ENTRIES = 200
# torch keeps 2,000 entries by default, half a kilobyte each.
MAX_DUMP_BYTES = 8 << 20
MAX_SIZES = 8
_SIZES = ("input_sizes", "output_sizes")
# NCCL's own recorder first; the other one serves gloo and is empty beside NCCL.
_HANDLERS = ("dump_nccl_trace_json", "fr_trace_json")
# A thread that never came back: one is enough.
_given_up: list[threading.Thread] = []


def collectives_in_flight() -> list[dict[str, Any]] | None:
    """Return the unfinished collectives and the newest of each process group, oldest first.

    None if torch.distributed is not in use, has no recorder, or does not return in time.
    """
    try:
        _given_up[:] = [thread for thread in _given_up if thread.is_alive()]
        module = _control_plane()
        if module is None or _given_up:
            return None
        answers: list[str] = []
        asking = threading.Thread(
            target=_ask, args=(module, answers), name="warpwatch-flight", daemon=True
        )
        asking.start()
        asking.join(TIMEOUT_S)
        if asking.is_alive():
            _given_up.append(asking)
        found = [_collective(entry) for text in list(answers) for entry in _entries(text)]
        return _newest(found)
    except Exception as error:
        faults.swallow(error)
        return None


def _control_plane() -> Any | None:
    """Return torch's module with the handlers if there is a process group (torch 2.5 and newer)."""
    distributed = sys.modules.get("torch.distributed")
    ready = getattr(distributed, "is_initialized", None)
    if ready is None or not ready():
        return None
    module = sys.modules.get("torch._C._distributed_c10d")
    return module if hasattr(module, "_get_handler_names") else None


def _ask(module: Any, answers: list[str]) -> None:
    class Request(module._Request):  # type: ignore[misc]
        def body(self) -> bytes:
            return b""

        def params(self) -> dict[str, str]:
            return {}

        def get_param(self, _name: str) -> str:
            return ""

    class Response(module._Response):  # type: ignore[misc]
        def set_content(self, content: str | bytes, _content_type: str) -> None:
            if len(content) <= MAX_DUMP_BYTES:
                answers.append(content if isinstance(content, str) else content.decode())

        def set_status(self, _status: int) -> None:
            return

    try:
        known = module._get_handler_names()
        for name in _HANDLERS:
            if name in known:
                module._get_handler(name)(Request(), Response())
    except Exception as error:
        faults.swallow(error)


def _entries(text: str) -> list[dict[str, Any]]:
    found = json.loads(text)
    entries = found.get("entries", []) if isinstance(found, dict) else []
    return [entry for entry in entries if isinstance(entry, dict)]


def _collective(entry: dict[str, Any]) -> dict[str, Any]:
    """Return an entry in our form; ``sequence`` counts collectives or point-to-point calls."""
    group = entry.get("process_group")
    p2p = bool(entry.get("is_p2p"))
    created = entry.get("time_created_ns")
    return {
        "sequence": entry.get("p2p_seq_id" if p2p else "collective_seq_id"),
        "name": str(entry.get("profiling_name", ""))[:64],
        "state": "completed" if entry.get("retired") else str(entry.get("state", ""))[:16],
        "process_group": str(group[0] if isinstance(group, list) and group else "")[:64],
        "p2p": p2p,
        **{name: list(entry.get(name) or ())[:MAX_SIZES] for name in _SIZES},
        "time": created / 1e9 if isinstance(created, int) else None,
    }


def _newest(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the newest MAX_ENTRIES that are unfinished or the last of their group."""
    last = {(entry["process_group"], entry["p2p"]): index for index, entry in enumerate(found)}
    kept = set(last.values())
    chosen = [
        entry for index, entry in enumerate(found) if index in kept or entry["state"] != "completed"
    ]
    return chosen[-MAX_ENTRIES:]
