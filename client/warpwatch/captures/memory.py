"""Kind memory: the history of PyTorch's CUDA allocator over some steps, and what it holds then.

``.memory.pickle`` is the snapshot for the viewer at https://pytorch.org/memory_viz;
``.memory.json`` says the same in short, by the Python line that allocated.
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

# Bounds what is kept: an entry takes up to some KB.
MAX_ENTRIES = 100_000
# The lines of Python that hold most.
MAX_LINES = 50
# Blocks allocated before the recording, or by C++ alone.
UNKNOWN = "?"


class MemoryRecorder:
    """``torch`` has ``cuda.memory._record_memory_history`` and ``_snapshot``."""

    def __init__(self, torch: Any) -> None:
        self.events = self.size_bytes = 0
        self._memory = torch.cuda.memory
        self._recording = False
        self._snapshot: dict[str, Any] | None = None
        self._about: dict[str, Any] = {}

    def prepare(self) -> None:
        """Nothing: the allocator needs no lead-in."""

    def start(self, number: int) -> None:
        self._recording = True
        self._memory._record_memory_history("all", stacks="python", max_entries=MAX_ENTRIES)

    def next_step(self, number: int) -> None:
        """Nothing: the allocator knows no steps."""

    def stop(self, about: dict[str, Any]) -> None:
        begun = time.monotonic()
        self._snapshot = self._memory._snapshot()
        self._about = {**about, "snapshot_s": round(time.monotonic() - begun, 3)}
        self.drop()

    def export(self, base: str) -> None:
        """Nothing: the helper writes it."""

    def deliver(self, base: str, beat: Callable[[], None]) -> dict[str, Any]:
        import pickle

        snapshot, self._snapshot = self._snapshot, None
        if snapshot is None:
            raise RuntimeError("no snapshot")
        text = json.dumps({**self._about, **summary(snapshot)}, indent=1).encode()
        beat()

        def write(fd: int) -> None:
            with os.fdopen(os.dup(fd), "wb") as file:
                pickle.dump(snapshot, _Beating(file, beat))

        more = inbox.hand_over(base, ".memory.json", lambda fd: inbox.write(fd, text))
        try:
            token = inbox.hand_over(base, ".memory.pickle", write)
        except BaseException:
            # Without an answer no one takes it.
            with suppress(OSError):
                os.unlink(f"{base}.{more}.memory.json")
            raise
        took = f"snapshot {self._about['snapshot_s']} s"
        return {"token": token, "more": more, "detail": took}

    def drop(self) -> None:
        if self._recording:
            self._recording = False
            self._memory._record_memory_history(None)

    def discard(self, base: str) -> None:
        self._snapshot = None


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
