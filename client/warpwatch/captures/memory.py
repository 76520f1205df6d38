"""Records captures of kind memory: the memory that grows over some steps, on host and device.

``.memory.json`` holds the growth on the host, by line and type, and the memory that PyTorch's CUDA
allocator holds, by Python line. If the process uses CUDA, ``.memory.pickle`` is the allocator's
snapshot with its history, for the viewer at https://pytorch.org/memory_viz.

The host is measured at the ends of up to three steps. Counted are the objects of each type (gc),
the allocations since the first step (tracemalloc) and the process's memory. Native memory, such as
a kept autograd graph, shows only in the last.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import sysconfig
import time
import tracemalloc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from io import BufferedWriter, FileIO
from statistics import median
from typing import Any, NamedTuple

from warpwatch import rendezvous
from warpwatch.captures.recording import Recorder, operators

# Bounds what is kept: an entry takes up to some KB.
MAX_ENTRIES = 100_000
# The lines of Python that hold most.
MAX_ALLOCATOR_LINES = 50
# Blocks allocated before the recording, or by C++ alone.
UNKNOWN = "?"


class MemoryRecorder(Recorder):
    """A recorder of memory. allocator: torch's module for snapshots; None if no GPU is in use."""

    stops_anywhere = True

    def __init__(self, allocator: Any, steps: int) -> None:
        self._allocator = allocator
        self._host = HostGrowth(steps)
        self._recording = False
        self._snapshot: dict[str, Any] | None = None
        self._about: dict[str, Any] = {}

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

    def deliver(self, base: str, beat: Callable[[], None]) -> dict[str, Any]:
        snapshot, self._snapshot = self._snapshot, None
        report = {**self._about, "host": self._host.report(beat)}
        if snapshot is not None:
            report |= summary(snapshot)
        text = json.dumps(report, indent=1).encode()
        beat()
        more = rendezvous.hand_over(base, ".memory.json", lambda fd: rendezvous.write(fd, text))
        if snapshot is None:
            return {"more": more}
        try:
            token = _hand_over_snapshot(base, snapshot, beat)
        except BaseException:
            # Nobody fetches the file of a failed capture.
            with suppress(OSError):
                os.unlink(f"{base}.{more}.memory.json")
            raise
        return {"token": token, "more": more, "detail": f"snapshot {self._about['snapshot_s']} s"}

    def drop(self) -> None:
        self._host.drop()
        if self._recording:
            self._recording = False
            self._allocator._record_memory_history(None)

    def discard(self, base: str) -> None:
        self._snapshot = None


def _hand_over_snapshot(base: str, snapshot: Any, beat: Callable[[], None]) -> str:
    import pickle

    class Beating(BufferedWriter):
        """A file that beats with every write: pickle writes in pieces of 64 KiB."""

        def write(self, data: Any) -> int:
            beat()
            return super().write(data)

    def write(fd: int) -> None:
        with Beating(FileIO(os.dup(fd), "wb")) as file:
            pickle.dump(snapshot, file)

    return rendezvous.hand_over(base, ".memory.pickle", write)


def summary(snapshot: dict[str, Any]) -> dict[str, Any]:
    """Return bytes and blocks in use by the Python line that allocated them, the largest first."""
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
            for line, (size, blocks) in largest[:MAX_ALLOCATOR_LINES]
        ],
    }


def _blocks_in_use(segment: dict[str, Any]) -> Iterator[tuple[str, int]]:
    for block in segment.get("blocks", ()):
        if str(block.get("state", "")).startswith("active"):
            yield _line(block.get("frames") or ()), int(block.get("size", 0))


def _line(frames: Any) -> str:
    """Return the innermost frame outside torch."""
    torch_file = getattr(sys.modules.get("torch"), "__file__", None)
    of_torch = os.path.dirname(torch_file) + os.sep if torch_file else "??"
    named = [f"{f['filename']}:{f['line']} {f['name']}" for f in frames if f.get("filename")]
    theirs = [line for line in named if not line.startswith((of_torch, "??"))]
    return (theirs or named or [UNKNOWN])[0]


# Frames of each allocation: as deep as libraries hide the user's line. Each costs time.
FRAMES = 8
# Tracing stops early after this time, or if it needs this much memory itself.
MAX_TRACE_S = 30.0
MAX_TRACE_BYTES = 256 << 20
# Objects are counted no more where that took more of a core's time: there are millions of them.
MAX_COUNT_S = 0.5
# The lines and types that grow most, and the objects of each type that are looked at.
MAX_LINES = 20
MAX_TYPES = 8
MAX_OBJECTS = 200
# The marks keep fewer objects of a type themselves.
MIN_COUNT = 4
# Nodes of a graph that are followed back; a step has hundreds.
MAX_NODES = 5000
# The number of a node that accumulates gradients.
_NO_NUMBER = 2**63

# Bytes before an object in its block: none, or the headers of the collector and a ``__dict__``.
_HEADERS = (0, 16, 24, 32)
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep


class Mark(NamedTuple):
    """The memory after ``steps`` recorded steps. ``anonymous_bytes`` is ``None`` if unknown."""

    steps: int
    anonymous_bytes: int | None
    types: Counter[type]
    traces: Sequence[Any]


class HostGrowth:
    """Traces host memory. Training thread: ``mark``, ``stop``; helper thread: ``report``."""

    def __init__(
        self,
        steps: int,
        monotonic: Callable[[], float] = time.monotonic,
        core: Callable[[], float] = time.thread_time,
    ) -> None:
        self._due = {1, (1 + steps) // 2, steps}
        self._monotonic, self._core = monotonic, core
        self._traces = self._ended = False
        self._counts = True
        self._begun = 0.0
        self._steps = 0
        self._first_number = 0
        self._marks: list[Mark] = []
        self._own_bytes = 0  # what the marks have left in the process
        self._types: list[dict[str, Any]] = []
        self._graph: dict[str, Any] | None = None

    def start(self) -> None:
        """Trace allocations, unless the program does so itself."""
        self._begun = self._monotonic()
        self._first_number = operators() or 0
        if not tracemalloc.is_tracing():
            _tracing.add(self)
            tracemalloc.start(FRAMES)
            self._traces = True
            if self._ended:
                # The helper thread has given up meanwhile.
                self.drop()

    def step_ended(self) -> None:
        """Take a mark if one is due, and end early what takes too long or too much."""
        self._steps += 1
        long = self._monotonic() - self._begun > MAX_TRACE_S
        large = self._traces and tracemalloc.get_tracemalloc_memory() > MAX_TRACE_BYTES
        if self._ended or not (long or large or self._steps in self._due):
            return
        self._mark()
        if long or large:
            self.stop()

    def stop(self) -> None:
        """Look at what grew while its allocations are known, and end tracing."""
        if not self._ended:
            self._ended = True
            if len(self._marks) > 1 and self._counts:
                self._examine_growth()
        self.drop()

    def drop(self) -> None:
        self._ended = True
        if self._traces:
            self._traces = False
            _tracing.discard(self)
            tracemalloc.stop()

    def report(self, beat: Callable[[], None]) -> dict[str, Any] | None:
        """Return the growth a step, as JSON; None if fewer than two steps were seen."""
        if len(self._marks) < 2:
            return None
        first, last = self._marks[0], self._marks[-1]
        steps = last.steps - first.steps
        grown = None
        if first.anonymous_bytes is not None and last.anonymous_bytes is not None:
            grown = round((last.anonymous_bytes - first.anonymous_bytes) / steps)
        lines = self._lines(beat)
        self._marks.clear()
        return {
            "steps": steps,
            "bytes_per_step": grown,
            "lines": lines,
            "types": self._types if self._counts else None,
            "graph": self._graph,
            "collects": gc.isenabled(),
        }

    def _mark(self) -> None:
        before = _anonymous_bytes()
        traced = tracemalloc.get_tracemalloc_memory() if self._traces else 0
        types: Counter[type] = Counter()
        if self._counts:
            began = self._core()
            types = _count_types()
            self._counts = self._core() - began <= MAX_COUNT_S
        traces = tracemalloc.take_snapshot().traces if self._traces else ()
        after = _anonymous_bytes()
        if before is None or after is None:
            used = None
        else:
            used = before - traced - self._own_bytes
            self._own_bytes += after - before
        self._marks.append(Mark(self._steps, used, types, traces))

    def _lines(self, beat: Callable[[], None]) -> list[dict[str, Any]]:
        """Return the lines whose allocations grow from mark to mark, the fastest first."""
        sums: list[Counter[str]] = []
        blocks: list[Counter[tuple[str, int]]] = []
        for mark in self._marks:
            sums.append(Counter())
            blocks.append(Counter())
            for number, trace in enumerate(mark.traces):
                if number % 10_000 == 0:
                    beat()
                line = line_of(trace.traceback)
                sums[-1][line] += trace.size
                blocks[-1][line, trace.size] += 1
        steps = self._marks[-1].steps - self._marks[0].steps
        # Objects that do not know their line get it from what is as large as they are.
        for growth in self._types:
            sizes = growth.pop("sizes")
            if "." in growth["type"]:
                growth["line"] = growth["line"] or _line_of_size(blocks, sizes)
        # Built-in objects without a line belong to the marks themselves.
        self._types = [one for one in self._types if one["line"] or "." in one["type"]]
        grown = {
            line: round((size - sums[0][line]) / steps)
            for line, size in sums[-1].items()
            if line and is_rising([each[line] for each in sums])
        }
        fastest = sorted(grown, key=lambda line: -grown[line])[:MAX_LINES]
        return [{"line": line, "bytes_per_step": grown[line]} for line in fastest]

    def _examine_growth(self) -> None:
        first, last = self._marks[0], self._marks[-1]
        steps = last.steps - first.steps
        rising = [
            kind
            for kind, count in (last.types - first.types).most_common(4 * MAX_TYPES)
            if count >= max(steps / 2, MIN_COUNT)
            and is_rising([mark.types[kind] for mark in self._marks])
        ]
        found: dict[type, list[Any]] = {kind: [] for kind in rising[:MAX_TYPES]}
        torch = sys.modules.get("torch")
        tensor = getattr(torch, "Tensor", None)
        graphs = []
        grown = {kind: min(last.types[kind] - first.types[kind], MAX_OBJECTS) for kind in found}
        for one in _newest_first():
            kind = type(one)
            if kind in found and len(found[kind]) < grown[kind]:
                found[kind].append(one)
            if kind is tensor and one.grad_fn is not None:
                graphs.append(one)
        rates = {kind: (last.types[kind] - first.types[kind]) / steps for kind in found}
        self._types = [_growth_of(kind, rates[kind], found[kind], tensor) for kind in found]
        kept = (one for one in graphs if self._reaches_back(one.grad_fn))
        self._graph = next(({"line": _line_of_object(one)} for one in kept), None)

    def _reaches_back(self, node: Any) -> bool:
        """Return whether the node's graph has operators from before the first recorded step."""
        seen, left = {node}, [node]
        while left and len(seen) < MAX_NODES:
            one = left.pop()
            number = getattr(one, "_sequence_nr", lambda: _NO_NUMBER)()
            if number < self._first_number:
                return True
            # The first input is the older sum, in `total = total + loss`: it is followed first.
            inputs = [input for input, _ in reversed(one.next_functions) if input is not None]
            new = [input for input in inputs if input not in seen]
            seen.update(new)
            left += new
        return False


# The one object that traces now, if any.
_tracing: set[HostGrowth] = set()


def _in_child() -> None:
    """Stop the tracing that a forked data loader worker inherits."""
    if _tracing:
        _tracing.clear()
        tracemalloc.stop()


os.register_at_fork(after_in_child=_in_child)


def _count_types() -> Counter[type]:
    # A counter makes a number for each object, and each would be traced: ten times as slow.
    found: dict[type, list[None]] = defaultdict(list)
    for one in gc.get_objects():
        found[type(one)].append(None)
    return Counter({kind: len(objects) for kind, objects in found.items()})


def _newest_first() -> Iterator[Any]:
    for generation in range(3):
        yield from reversed(gc.get_objects(generation=generation))


def is_rising(values: Sequence[float]) -> bool:
    """Return whether each part of the values rises, by a quarter of an even share at least."""
    rises = [after - before for before, after in zip(values, values[1:])]
    total = sum(rises)
    return total > 0 and min(rises) >= total / len(rises) / 4


def line_of(traceback: Any) -> str:
    """Return file and line of the innermost frame that no library has; empty for our own."""
    frames = [f"{frame.filename}:{frame.lineno}" for frame in reversed(traceback)]
    theirs = (frame for frame in frames if not _is_library(frame))
    line = next(theirs, frames[0] if frames else "?")
    return "" if line.startswith(_OWN) else line


def _is_library(frame: str) -> bool:
    """Return whether a frame is of Python's own library or of torch."""
    if "site-packages" in frame or "dist-packages" in frame:
        return f"-packages{os.sep}torch{os.sep}" in frame
    return frame.startswith(("<frozen", _LIBRARY))


def _growth_of(kind: type, rate: float, newest: list[Any], tensor: Any) -> dict[str, Any]:
    lines = Counter(line for one in newest if (line := _line_of_object(one)))
    sizes = [_size(one, tensor) for one in newest]
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return {
        "type": f"{module}{kind.__qualname__}",
        "count_per_step": round(rate, 2),
        # Among the newest are some that live for a step only, such as the batch.
        "bytes_per_step": round(rate * median(sizes)) if sizes else 0,
        "line": lines.most_common(1)[0][0] if lines else None,
        "sizes": [kind.__basicsize__ + header for header in _HEADERS],
    }


def _line_of_size(blocks: list[Counter[tuple[str, int]]], sizes: Sequence[int]) -> str | None:
    """Return the line of which the most blocks of these sizes have come to be.

    Before 3.12 Python does not know the allocation of an object with a ``__dict__``.
    """
    grown = blocks[-1] - blocks[0]
    found = {line: count for (line, size), count in grown.items() if size in sizes and line}
    return max(found, key=lambda line: found[line], default=None)


def _line_of_object(one: Any) -> str | None:
    traceback = tracemalloc.get_object_traceback(one)
    return (traceback and line_of(traceback)) or None


def _size(one: Any, tensor: Any) -> int:
    """Return the bytes of the object itself, with the values of a tensor on the CPU."""
    with suppress(Exception):  # an object may lie about its size, or raise
        values = one.numel() * one.element_size() if type(one) is tensor and one.is_cpu else 0
        return int(values) + sys.getsizeof(one)
    return 0


def _anonymous_bytes() -> int | None:
    with suppress(OSError, ValueError, IndexError), open("/proc/self/status", "rb") as status:
        for line in status:
            if line.startswith(b"RssAnon:"):
                return int(line.split()[1]) * 1024
    return None
