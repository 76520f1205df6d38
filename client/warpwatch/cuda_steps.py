"""Steps timed on the GPU: CUDA events from a reused pool, read back later, never waited for.

Every border of the step clock is also an event on the current stream. The time between two
events belongs to the phase that was innermost, as on the clock. Events are asked (``query``) from
the training thread at later borders only: asking from another thread can break a graph capture.
All events of a step are on the stream that was current at its begin: collectives and prefetching
have streams of their own, and between two streams no time is the step's.
"""

from __future__ import annotations

from collections import deque
from threading import get_ident
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from warpwatch import faults, protocol
from warpwatch.columns import DURATION
from warpwatch.protocol import ABSENT

if TYPE_CHECKING:
    from warpwatch.ring import RingWriter

POOL_SIZE = 512
MEMORY_INTERVAL_NS = 1_000_000_000
# Steps that wait to be read back; the CPU is seldom more than a few ahead.
MAX_PENDING = 64
# A step that is not ready is not asked again at once, where steps are shorter than this.
QUERY_INTERVAL_NS = 1_000_000


class Clock(Protocol):
    """The step clock as its GPU side sees it; ``finish`` takes a step whose times are known."""

    current: int
    thread: int
    ring: RingWriter | None

    def finish(
        self, flags: int, wall_ns: int, number: int, gpu_ns: int, allocated: int, spent: list[int]
    ) -> None: ...


class _Mark(NamedTuple):
    event: Any
    phase: int


class _PendingStep(NamedTuple):
    """``marks`` ends with the step's end event; it is empty when only the clock's times hold.

    ``pool`` is where the events go back to; those of another device than the step before have
    gone already.
    """

    flags: int
    wall_ns: int
    number: int
    allocated: int
    spent: list[int]
    marks: list[_Mark]
    begin: Any
    previous_end: Any
    pool: deque[Any]


class CudaSteps:
    """``cuda`` is the module torch.cuda: Event, streams, memory statistics.

    Events belong to the device on which they were first recorded, so each device has a pool.
    """

    def __init__(
        self,
        cuda: Any,
        pool_size: int = POOL_SIZE,
        query_interval_ns: int = QUERY_INTERVAL_NS,
    ) -> None:
        self._cuda = cuda
        self._pool_size = pool_size
        self._query_interval_ns = query_interval_ns
        self._pools: dict[int, deque[Any]] = {}
        self._free: deque[Any] = deque()
        self._stream: Any = None
        self._device = -1
        self._pending: deque[_PendingStep] = deque()
        self._marks: list[_Mark] = []
        self._begin: Any = None
        self._previous_end: Any = None
        self._previous_pool: deque[Any] = self._free
        self._whole = False
        self._query_ns = 0
        self._memory_ns = 0
        self._memory = True
        self._ooms = 0

    def begin(self, current: int) -> None:
        self._stream = stream = self._cuda.current_stream()
        if stream.device_index != self._device:
            self._move(stream.device_index)
        self._begin = self._mark(current)

    def border(self, current: int) -> None:
        """A phase begins or ends; ``current`` is the phase that was innermost until now."""
        if self._whole:
            self._mark(current)

    def end(self, clock: Clock, flags: int, wall_ns: int, number: int, spent: list[int]) -> None:
        """The step ended on the CPU; it is finished when the GPU has come that far."""
        end = self._mark(clock.current)
        marks = self._marks
        if not self._whole or self._begin is None or end is None or self._previous_end is None:
            self._free.extend(mark.event for mark in marks if mark.event is not end)
            marks = []
        allocated = self._read_memory(clock)
        begin, previous_end, pool = self._begin, self._previous_end, self._previous_pool
        step = (flags, wall_ns, number, allocated, spent, marks, begin, previous_end, pool)
        self._pending.append(_PendingStep(*step))
        self._previous_end, self._begin, self._marks = end, None, []
        self._previous_pool = self._free
        self._whole = True
        self.harvest(clock)

    def restart(self) -> None:
        """What has run belongs to no step: the times of the next one begin with itself."""
        self._free.extend(mark.event for mark in self._marks)
        self._marks = []
        self._begin = self._previous_end = None
        self._whole = False

    def harvest(self, clock: Clock, flush: bool = False) -> None:
        """Finish the steps that the GPU has completed, oldest first.

        With ``flush``, or when too many wait, the rest is finished with the clock's times. In
        another thread than the training's no event is asked: it may be capturing a graph.
        """
        silent = get_ident() != clock.thread or self._capturing()
        pending = self._pending
        while pending:
            oldest = pending[0]
            ready = not oldest.marks or (not silent and self._is_ready(oldest, flush))
            if not ready and not flush and len(pending) <= MAX_PENDING:
                return
            pending.popleft()
            spent = oldest.spent
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
            event.record(self._stream)
        except Exception as error:
            faults.swallow(error)
            self._whole = False
            return None
        self._marks.append(_Mark(event, phase))
        return event

    def _is_ready(self, pending: _PendingStep, flush: bool) -> bool:
        now = monotonic_ns()
        if now < self._query_ns and not flush:
            return False
        try:
            ready = bool(pending.marks[-1].event.query())
        except Exception as error:
            # A GPU that failed: the program hears of it by itself.
            faults.swallow(error)
            ready = False
        if not ready:
            self._query_ns = now + self._query_interval_ns
        return ready

    def _move(self, device: int) -> None:
        """Steps run on this device from now on; this one by the clock."""
        self._free.extend(mark.event for mark in self._marks)
        self._marks = []
        self._whole = False
        self._device = device
        if device not in self._pools:
            events = (self._cuda.Event(enable_timing=True) for _ in range(self._pool_size))
            self._pools[device] = deque(events)
        self._free = self._pools[device]

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
        pending.pool.extend(mark.event for mark in pending.marks[:-1])
        if pending.previous_end is not None:
            pending.pool.append(pending.previous_end)

    def _capturing(self) -> bool:
        return bool(self._cuda.is_current_stream_capturing())

    def _read_memory(self, clock: Clock) -> int:
        """Allocated bytes, and a memory record beside it; ABSENT if it was read a moment ago.

        The statistics are counters that the allocator keeps: nothing waits for the GPU. Allocators
        plugged in by the program may have none.
        """
        now = monotonic_ns()
        if not self._memory or now - self._memory_ns < MEMORY_INTERVAL_NS:
            return ABSENT
        self._memory_ns = now
        try:
            statistics = self._cuda.memory_stats_as_nested_dict()
            values = _memory_words(statistics)
            if statistics and clock.ring is not None:
                clock.ring.append(protocol.RECORD_MEMORY, protocol.MEMORY.pack(*values))
                self._tell_oom(clock.ring, values[4])
        except Exception as error:
            faults.swallow(error)
            self._memory = False
            return ABSENT
        return values[0]

    def _tell_oom(self, ring: RingWriter, ooms: int) -> None:
        """One that the program caught is told here; each rise of the counter once."""
        new = ooms - self._ooms
        self._ooms = ooms
        if new > 0:
            ring.event("oom", detail=f"{new} failed allocations on the device")


def _memory_words(statistics: dict[str, Any]) -> tuple[int, ...]:
    """As protocol.MEMORY has them; ABSENT is what this allocator does not know."""

    def value(name: str, kind: str) -> int:
        return int(statistics.get(name, {}).get("all", {}).get(kind, ABSENT))

    return (
        value("allocated_bytes", "current"),
        value("reserved_bytes", "current"),
        value("allocated_bytes", "peak"),
        int(statistics.get("num_alloc_retries", 0)),
        int(statistics.get("num_ooms", 0)),
        value("inactive_split_bytes", "current"),
    )


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
