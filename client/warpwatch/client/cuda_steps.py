"""Steps timed on the GPU: CUDA events from a reused pool, read back later, never waited for.

Every border of the step clock is also an event on the current stream. The time between two
events belongs to the phase that was innermost, as on the clock. Events are asked (``query``) from
the training thread at later borders only: asking from another thread can break a graph capture.
"""

from __future__ import annotations

from collections import deque
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from warpwatch.client import faults, protocol
from warpwatch.client.protocol import ABSENT

if TYPE_CHECKING:
    from warpwatch.client.ring import RingWriter

# Where the duration stands in what a step spent; the phases follow it (steps.py).
DURATION = 4
POOL_SIZE = 512
MEMORY_INTERVAL_NS = 1_000_000_000
# Steps that wait to be read back; the CPU is seldom more than a few ahead.
MAX_PENDING = 64


class Clock(Protocol):
    """The step clock as its GPU side sees it; ``finish`` takes a step whose times are known."""

    flags: int
    current: int
    totals: list[int]
    ring: RingWriter | None

    def finish(
        self, flags: int, wall_ns: int, number: int, gpu_ns: int, allocated: int, spent: list[int]
    ) -> None: ...


class _Mark(NamedTuple):
    event: Any
    phase: int


class _PendingStep(NamedTuple):
    """``marks`` ends with the step's end event; it is empty when only the clock's times hold."""

    flags: int
    wall_ns: int
    number: int
    allocated: int
    spent: list[int]
    marks: list[_Mark]
    begin: Any
    previous_end: Any


class CudaSteps:
    """``cuda`` is the module torch.cuda: Event, is_current_stream_capturing, memory statistics."""

    def __init__(self, cuda: Any, pool_size: int = POOL_SIZE) -> None:
        self._cuda = cuda
        self._free = deque(cuda.Event(enable_timing=True) for _ in range(pool_size))
        self._pending: deque[_PendingStep] = deque()
        self._marks: list[_Mark] = []
        self._begin: Any = None
        self._previous_end: Any = None
        self._whole = False
        self._memory_ns = 0

    def begin(self, current: int) -> None:
        self._begin = self._mark(current)

    def border(self, current: int) -> None:
        """A phase begins or ends; ``current`` is the phase that was innermost until now."""
        if self._whole:
            self._mark(current)

    def end(self, clock: Clock, wall_ns: int, number: int, spent: list[int]) -> None:
        """The step ended on the CPU; it is finished when the GPU has come that far."""
        end = self._mark(clock.current)
        marks = self._marks
        if not self._whole or self._begin is None or end is None or self._previous_end is None:
            self._free.extend(mark.event for mark in marks if mark.event is not end)
            marks = []
        begin, previous_end = self._begin, self._previous_end
        allocated = self._read_memory(clock)
        self._pending.append(
            _PendingStep(clock.flags, wall_ns, number, allocated, spent, marks, begin, previous_end)
        )
        self._previous_end, self._begin, self._marks = end, None, []
        self._whole = True
        self.harvest(clock)

    def harvest(self, clock: Clock, flush: bool = False) -> None:
        """Finish the steps that the GPU has completed, oldest first.

        With ``flush``, or when too many wait, the rest is finished with the clock's times.
        """
        capturing = self._capturing()
        pending = self._pending
        while pending:
            oldest = pending[0]
            ready = not oldest.marks or (not capturing and oldest.marks[-1].event.query())
            if not ready and not flush and len(pending) <= MAX_PENDING:
                return
            pending.popleft()
            spent = oldest.spent + [0] * (len(clock.totals) - len(oldest.spent))
            gpu_ns = ABSENT
            try:
                if ready and oldest.marks:
                    gpu_ns = self._measure(oldest, spent)
            except Exception as error:
                # Events of two devices cannot be compared: the step keeps the clock's times.
                faults.swallow(error)
            self._release(oldest)
            clock.finish(
                oldest.flags, oldest.wall_ns, oldest.number, gpu_ns, oldest.allocated, spent
            )

    def _mark(self, phase: int) -> Any:
        """Record an event; None, and a step by the clock, when it cannot be."""
        try:
            if not self._free or self._capturing():
                self._whole = False
                return None
            event = self._free.popleft()
            event.record()
        except Exception as error:
            faults.swallow(error)
            self._whole = False
            return None
        self._marks.append(_Mark(event, phase))
        return event

    def _measure(self, pending: _PendingStep, spent: list[int]) -> int:
        """Put the GPU's times in place of the clock's; returns begin to end of the step in ns."""
        times = [0] * len(spent)
        previous = pending.previous_end
        for mark in pending.marks:
            times[mark.phase] += _nanoseconds(previous, mark.event)
            previous = mark.event
        times[DURATION] = sum(times)
        gpu_ns = _nanoseconds(pending.begin, previous)
        spent[DURATION:] = times[DURATION:]
        return gpu_ns

    def _release(self, pending: _PendingStep) -> None:
        """Back to the pool, but for the end event: the next step begins there."""
        self._free.extend(mark.event for mark in pending.marks[:-1])
        if pending.previous_end is not None:
            self._free.append(pending.previous_end)

    def _capturing(self) -> bool:
        return bool(self._cuda.is_current_stream_capturing())

    def _read_memory(self, clock: Clock) -> int:
        """Allocated bytes, and a memory record beside it; ABSENT if it was read a moment ago."""
        now = monotonic_ns()
        if now - self._memory_ns < MEMORY_INTERVAL_NS:
            return ABSENT
        self._memory_ns = now
        statistics = self._cuda.memory_stats_as_nested_dict()
        allocated = statistics.get("allocated_bytes", {}).get("all", {})
        reserved = statistics.get("reserved_bytes", {}).get("all", {})
        inactive = statistics.get("inactive_split_bytes", {}).get("all", {})
        values = (
            allocated.get("current", ABSENT),
            reserved.get("current", ABSENT),
            allocated.get("peak", ABSENT),
            statistics.get("num_alloc_retries", 0),
            statistics.get("num_ooms", 0),
            inactive.get("current", ABSENT),
        )
        if clock.ring is not None:
            clock.ring.append(protocol.RECORD_MEMORY, protocol.MEMORY.pack(*values))
        return int(values[0])


def _nanoseconds(begin: Any, end: Any) -> int:
    milliseconds: float = begin.elapsed_time(end)
    return max(0, round(milliseconds * 1e6))


def device_uuid(cuda: Any, visible: str | None) -> str | None:
    """The UUID of the calling thread's device. ``visible`` is CUDA_VISIBLE_DEVICES."""
    index: int = cuda.current_device()
    names = [name.strip() for name in (visible or "").split(",")]
    if index < len(names) and names[index].startswith("MIG-"):
        return names[index]
    uuid = getattr(cuda.get_device_properties(index), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else None
