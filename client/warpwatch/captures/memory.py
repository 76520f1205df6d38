"""Kind memory: what of the process's memory grows over some steps, on the host and on the device.

``.memory.json`` is what grows on the host, by line and type, and what PyTorch's CUDA allocator
holds, by the Python line that allocated; ``.memory.pickle``, of a process that uses CUDA, is the
allocator's snapshot with its history, for the viewer at https://pytorch.org/memory_viz.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from warpwatch import inbox
from warpwatch.captures.host_memory import HostGrowth

# Bounds what is kept: an entry takes up to some KB.
MAX_ENTRIES = 100_000
# The lines of Python that hold most.
MAX_LINES = 50
# Blocks allocated before the recording, or by C++ alone.
UNKNOWN = "?"


class MemoryRecorder:
    """``allocator`` has ``_record_memory_history`` and ``_snapshot``; None: no GPU is in use."""

    stops_anywhere = True

    def __init__(self, allocator: Any, steps: int) -> None:
        self.events = self.size_bytes = 0
        self._allocator = allocator
        self._host = HostGrowth(steps)
        self._recording = False
        self._snapshot: dict[str, Any] | None = None
        self._about: dict[str, Any] = {}

    def prepare(self) -> None:
        """Nothing: neither needs a lead-in."""

    def start(self, number: int) -> None:
        if self._allocator is not None:
            self._recording = True
            self._allocator._record_memory_history("all", stacks="python", max_entries=MAX_ENTRIES)
        self._host.start()

    def next_step(self, number: int) -> None:
        self._host.step_ended()

    def stop(self, about: dict[str, Any]) -> None:
        self._host.step_ended()
        self._host.stop()
        self._about = about
        if self._allocator is not None:
            begun = time.monotonic()
            self._snapshot = self._allocator._snapshot()
            self._about = {**about, "snapshot_s": round(time.monotonic() - begun, 3)}
        self.drop()

    def export(self, base: str) -> None:
        """Nothing: the helper writes it."""

    def deliver(self, base: str, beat: Callable[[], None]) -> dict[str, Any]:
        snapshot, self._snapshot = self._snapshot, None
        said = {**self._about, "host": self._host.report(beat)}
        if snapshot is not None:
            said |= summary(snapshot)
        text = json.dumps(said, indent=1).encode()
        beat()
        more = inbox.hand_over(base, ".memory.json", lambda fd: inbox.write(fd, text))
        if snapshot is None:
            return {"more": more}
        try:
            token = _hand_over_snapshot(base, snapshot, beat)
        except BaseException:
            # Without an answer no one takes it.
            with suppress(OSError):
                os.unlink(f"{base}.{more}.memory.json")
            raise
        took = f"snapshot {self._about['snapshot_s']} s"
        return {"token": token, "more": more, "detail": took}

    def drop(self) -> None:
        self._host.drop()
        if self._recording:
            self._recording = False
            self._allocator._record_memory_history(None)

    def discard(self, base: str) -> None:
        self._snapshot = None


def _hand_over_snapshot(base: str, snapshot: Any, beat: Callable[[], None]) -> str:
    import pickle

    def write(fd: int) -> None:
        with os.fdopen(os.dup(fd), "wb") as file:
            pickle.dump(snapshot, _Beating(file, beat))

    return inbox.hand_over(base, ".memory.pickle", write)


class _Beating:
    """A file that beats with every write: pickle writes in pieces of 64 KiB."""

    def __init__(self, file: Any, beat: Callable[[], None]) -> None:
        self._file = file
        self._beat = beat

    def write(self, data: Any) -> int:
        self._beat()
        return int(self._file.write(data))


def summary(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Bytes and blocks in use by the line of Python that allocated them, the largest first."""
    lines: dict[str, list[int]] = {}
    reserved = 0
    for segment in snapshot.get("segments", ()):
        reserved += segment.get("total_size", 0)
        for frame, size in _blocks_in_use(segment):
            line = lines.setdefault(frame, [0, 0])
            line[0] += size
            line[1] += 1
    largest = sorted(lines.items(), key=lambda line: -line[1][0])
    return {
        "reserved_bytes": reserved,
        "allocated_bytes": sum(size for size, _ in lines.values()),
        "history_entries": sum(map(len, snapshot.get("device_traces", ()))),
        "lines": [
            {"line": line, "bytes": size, "blocks": blocks}
            for line, (size, blocks) in largest[:MAX_LINES]
        ],
    }


def _blocks_in_use(segment: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for block in segment.get("blocks", ()):
        if str(block.get("state", "")).startswith("active"):
            yield _line(block.get("frames") or ()), int(block.get("size", 0))


def _line(frames: Any) -> str:
    """The innermost frame that is not torch's own."""
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    of_torch = os.path.dirname(torch_file) + os.sep if torch_file else "??"
    named = [f"{f['filename']}:{f['line']} {f['name']}" for f in frames if f.get("filename")]
    theirs = [line for line in named if not line.startswith((of_torch, "??"))]
    return (theirs or named or [UNKNOWN])[0]
