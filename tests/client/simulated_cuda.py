"""A stand-in for torch.cuda: one stream of kernels and events, which runs on request."""

from __future__ import annotations

from collections import deque
from threading import get_ident
from types import SimpleNamespace
from typing import Any, NamedTuple

from warpwatch.captures.recording import Command
from warpwatch.captures.safety import Situation


class SimulatedStream(NamedTuple):
    """Compute has the queue of the simulation; of other streams nothing is known in order."""

    device_index: int
    compute: bool = True


class SimulatedEvent:
    """Like torch.cuda.Event: complete when the stream has come to it."""

    def __init__(self, cuda: SimulatedCuda) -> None:
        self._cuda = cuda
        self.at_ms: float | None = None
        self.device: int | None = None

    def record(self, stream: SimulatedStream) -> None:
        assert not self._cuda.graph_capture
        # Made on the device where it is recorded first, and bound to it.
        self.device = stream.device_index if self.device is None else self.device
        assert self.device == stream.device_index
        self.at_ms = None
        if stream.compute:
            self._cuda.queue.append(self)
        else:
            self.at_ms = -1.0

    def query(self) -> bool:
        self._cuda.queries += 1
        assert not self._cuda.graph_capture
        assert get_ident() == self._cuda.thread
        return self.at_ms is not None

    def elapsed_time(self, end: SimulatedEvent) -> float:
        assert self.at_ms is not None
        assert end.at_ms is not None
        if self.device != end.device:
            raise RuntimeError("events of two devices")
        return end.at_ms - self.at_ms


class SimulatedCuda:
    """Like the module torch.cuda: one stream of kernels (ms) and events."""

    def __init__(self) -> None:
        self.queue: deque[float | SimulatedEvent] = deque()
        self.now_ms = 0.0
        self.graph_capture = False
        self.memory_reads = 0
        self.statistics: dict[str, Any] = {
            "allocated_bytes": {"all": {"current": 7 << 30, "peak": 8 << 30}}
        }
        self.stream = SimulatedStream(0)
        self.thread = get_ident()
        self.queries = self.made = 0

    def Event(self, enable_timing: bool) -> SimulatedEvent:
        assert enable_timing
        self.made += 1
        return SimulatedEvent(self)

    def is_current_stream_capturing(self) -> bool:
        return self.graph_capture

    def memory_stats_as_nested_dict(self) -> dict[str, Any]:
        self.memory_reads += 1
        if not self.statistics:
            raise RuntimeError("this allocator has no statistics")
        return self.statistics

    def current_device(self) -> int:
        return self.stream.device_index

    def get_device_properties(self, index: int) -> object:
        return object()

    def current_stream(self) -> SimulatedStream:
        return self.stream

    def launch(self, ms: float) -> None:
        self.queue.append(ms)

    def run(self, leave: int = 0) -> None:
        """Let the GPU work until ``leave`` entries are left."""
        while len(self.queue) > leave:
            entry = self.queue.popleft()
            if isinstance(entry, SimulatedEvent):
                entry.at_ms = self.now_ms
            else:
                self.now_ms += entry


def torch(cuda: bool = True, version: str = "12.4", pools: int = 0) -> Any:
    """As much of torch as the checks look at: a process on a GPU with ``pools`` of graphs."""
    segments = [{"segment_pool_id": (0, 0)}, *[{"segment_pool_id": (0, 1)}] * pools]
    return SimpleNamespace(
        __version__="2.7.1+cu124",
        version=SimpleNamespace(cuda=version),
        autograd=SimpleNamespace(_profiler_enabled=lambda: False),
        cuda=SimpleNamespace(is_initialized=lambda: cuda, memory_snapshot=lambda: segments),
    )


def situation(found: Any, kind: str = "torch", **changes: Any) -> Situation:
    command = Command("capture", "c-1", kind, 40, 2, options=changes.pop("options", ()))
    room: dict[str, Any] = {"captures": 0, "inbox_problem": None}
    return Situation(command, found, changes.pop("environ", {}), **{**room, **changes})
