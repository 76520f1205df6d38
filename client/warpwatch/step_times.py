"""Turns the training thread's log of boundaries into phases, steps, totals and records.

Phases are disjoint: at each boundary the time since the last one goes to the innermost phase.
Without a GPU the helper thread settles the log too: a step that ended before a hang is written.

On a GPU each boundary also records a CUDA event of a reused pool on the stream that was current at
the step's start. Collectives and prefetching have other streams, and time between two streams
belongs to no step. Only the training thread queries events, some steps later, and never waits for
one: a query from another thread can break a graph capture.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from operator import length_hint
from typing import Any, Optional

from warpwatch import faults, protocol
from warpwatch.protocol import ABSENT, MAX_PHASES
from warpwatch.ring import (
    ALLOCATED,
    DURATION,
    FIRST_PHASE,
    GPU,
    NUMBER,
    SAMPLES,
    TOKENS,
    RingWriter,
    StepRow,
)

# Until a step's end, the place of its duration holds the time spent in no phase.
OTHER = DURATION
# The kinds of entries; any other number is the index of the phase that is entered. At NEXT a step
# ends and the next one starts.
LEAVE, SWITCH, BEGIN, NEXT, END, START = -1, -2, -3, -4, -5, -6
# Kind, time (monotonic, ns) and a detail. At NEXT and END the detail is flags, samples, tokens and
# work of the step. Elsewhere it is the phase between phases from now on; None means unchanged. On
# a GPU it is a pair: the detail, and the event recorded at the boundary.
Entry = tuple[int, int, Any]


# Six events a step under ``run``: enough for the steps of a settlement, and a GPU behind by more.
POOL_SIZE = 1024
MEMORY_INTERVAL_NS = 1_000_000_000
# Steps that wait to be read back, beyond which the oldest ones get the clock's times.
MAX_PENDING = 256


class PooledEvent:
    """A CUDA event, and the free ones of its device, to which it goes back."""

    __slots__ = ("event", "pool")

    def __init__(self, event: Any, pool: deque[PooledEvent]) -> None:
        self.event = event
        self.pool = pool


# A boundary's event, and the phase that ran until then.
_Mark = tuple[PooledEvent, int]
# A step that is not read back yet, the marks since the step before, where it began, and where the
# step before ended. The marks end with its own end; none: only the clock's times hold.
_PendingStep = tuple[StepRow, list[_Mark], Optional[PooledEvent], Optional[PooledEvent]]


class CudaSteps:
    """Step times by CUDA events. cuda: the module torch.cuda; log: appends an entry.

    used_up: called at a boundary for which no event is free, as after many without a step's end.
    Events belong to the device on which they were first recorded, so each device has a pool. They
    are recorded as the program comes to a boundary; to which phase and step one belongs is known
    later, in the same order, when the log is settled.
    """

    def __init__(
        self,
        cuda: Any,
        log: Callable[[Entry], None],
        used_up: Callable[[], None],
        pool_size: int = POOL_SIZE,
    ) -> None:
        self._cuda = cuda
        self._log = log
        self._used_up = used_up
        self._pool_size = pool_size
        self._pools: dict[int, deque[PooledEvent]] = {}
        self._free: deque[PooledEvent] = deque()
        self._stream: Any = None
        self._device = -1
        self._recorded: PooledEvent | None = None
        self._recorded_ns = 0
        self._pending: deque[_PendingStep] = deque()
        self._marks: list[_Mark] = []
        self._begin: PooledEvent | None = None
        self._previous_end: PooledEvent | None = None
        self._whole = False
        self._memory_ns = 0
        self._memory = True
        self._ooms = 0
        self.follow_stream()

    # --- at the boundaries ----------------------------------------------------------------------

    def push(self, entry: Entry) -> None:
        """Log a boundary with its event, or None if none can be recorded.

        Boundaries at the same time share one event, such as the ends of a phase and its step.
        """
        what, now, detail = entry
        if now != self._recorded_ns:
            self._recorded, self._recorded_ns = None, now
            try:
                if not self._free:
                    self._used_up()
                elif not self._cuda.is_current_stream_capturing():
                    event = self._free.popleft()
                    event.event.record(self._stream)
                    self._recorded = event
            except Exception as error:
                faults.swallow(error)
        self._log((what, now, (detail, self._recorded)))

    def follow_stream(self) -> None:
        """Record the events of the new step on the current stream. Never raises."""
        try:
            self._stream = stream = self._cuda.current_stream()
            device = stream.device_index
            if device != self._device:
                if device not in self._pools:
                    self._pools[device] = self._new_pool()
                self._device, self._free = device, self._pools[device]
        except Exception as error:
            faults.swallow(error)

    def _new_pool(self) -> deque[PooledEvent]:
        pool: deque[PooledEvent] = deque()
        for _ in range(self._pool_size):
            pool.append(PooledEvent(self._cuda.Event(enable_timing=True), pool))
        return pool

    # --- as the log is settled ------------------------------------------------------------------

    def mark(self, what: int, event: PooledEvent | None, phase: int) -> None:
        """Add a boundary; ``phase`` was innermost until now."""
        if event is None:
            self._whole = False
        elif event is not (self._marks[-1][0] if self._marks else self._previous_end):
            self._marks.append((event, phase))
        if what == BEGIN:
            self._begin = event

    def end(
        self,
        row: StepRow,
        event: PooledEvent | None,
        now: int,
        ring: RingWriter | None,
    ) -> None:
        """Queue the step that ended ``now`` on the CPU until the GPU has finished it.

        The next step starts there, unless it has a start of its own.
        """
        marks, begin, previous_end = self._marks, self._begin, self._previous_end
        # Events of two devices cannot be compared.
        one_device = event and previous_end and event.pool is previous_end.pool
        if not (self._whole and begin and one_device):
            _release([mark for mark, _ in marks if mark is not event])
            marks = []
        row[2][ALLOCATED] = self._read_memory(now, ring)
        if previous_end is event:
            # At the very same time: the next step begins there, too.
            previous_end = None
        self._pending.append((row, marks, begin, previous_end))
        self._previous_end, self._begin, self._marks = event, event, []
        self._whole = True

    def restart(self) -> None:
        """Discard the time since the last step: the next step's times start with itself."""
        # The last step's end is not read back yet, and the next step may share the newest event.
        _release([event for event, _ in self._marks[:-1]])
        del self._marks[:-1]
        self._begin = None
        self._whole = False

    def harvest(self, ask: bool, flush: bool = False) -> list[StepRow]:
        """Return the steps that the GPU has completed, oldest first.

        With ``flush``, or if too many wait, the rest gets the clock's times. Outside the training
        thread (no ``ask``) and during a graph capture no event is queried.
        """
        ask = ask and not self._cuda.is_current_stream_capturing()
        pending, finished = self._pending, []
        while pending:
            row, marks, begin, previous_end = pending[0]
            ready = not marks or (ask and _is_complete(marks[-1][0]))
            if not (ready or flush or len(pending) > MAX_PENDING):
                break
            pending.popleft()
            if ready and marks and begin is not None and previous_end is not None:
                _measure(row[2], marks, begin, previous_end)
            finished.append(row)
            # But for the end event: the next step begins there.
            _release([event for event, _ in marks[:-1]])
            if previous_end is not None:
                _release([previous_end])
        return finished

    def _read_memory(self, now: int, ring: RingWriter | None) -> int:
        """Return allocated bytes and write a memory record; ABSENT within a second of the last.

        The statistics are counters of the allocator and need no GPU. Custom allocators may have
        none.
        """
        if not self._memory or now - self._memory_ns < MEMORY_INTERVAL_NS:
            return ABSENT
        self._memory_ns = now
        try:
            statistics = self._cuda.memory_stats_as_nested_dict()
            values = _memory_words(statistics)
            if statistics and ring is not None:
                ring.append(protocol.RECORD_MEMORY, protocol.MEMORY.pack(*values))
                self._report_oom(ring, values[4])
        except Exception as error:
            faults.swallow(error)
            self._memory = False
            return ABSENT
        return values[0]

    def _report_oom(self, ring: RingWriter, ooms: int) -> None:
        """Report new out-of-memory errors, including those that the program caught."""
        new = ooms - self._ooms
        self._ooms = ooms
        if new > 0:
            ring.event("oom", detail=f"{new} failed allocations on the device")


def _release(events: list[PooledEvent]) -> None:
    for event in events:
        event.pool.append(event)


def _is_complete(event: PooledEvent) -> bool:
    try:
        return bool(event.event.query())
    except Exception as error:
        # If the GPU has failed, the program gets the error itself.
        faults.swallow(error)
        return False


def _measure(
    words: list[int], marks: list[_Mark], begin: PooledEvent, previous_end: PooledEvent
) -> None:
    """Replace the clock's times with the GPU's."""
    times = [0] * len(words)
    last = previous_end
    try:
        for event, phase in marks:
            times[phase] += _nanoseconds(last.event.elapsed_time(event.event))
            last = event
        times[DURATION] = since_begin = sum(times)
        if begin is not previous_end:
            since_begin = _nanoseconds(begin.event.elapsed_time(last.event))
    except Exception as error:
        faults.swallow(error)
        return
    words[DURATION], words[GPU] = times[DURATION], since_begin
    words[FIRST_PHASE:] = times[FIRST_PHASE:]


def _nanoseconds(milliseconds: float) -> int:
    return max(0, round(milliseconds * 1e6))


def _memory_words(statistics: dict[str, Any]) -> tuple[int, ...]:
    """Return the fields of protocol.MEMORY; ABSENT for those that this allocator lacks."""

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


def device_uuid(cuda: Any, visible: str | None) -> str | None:
    """Return the UUID of the calling thread's device. ``visible`` is CUDA_VISIBLE_DEVICES."""
    index: int = cuda.current_device()
    names = [name.strip() for name in (visible or "").split(",")]
    if index < len(names) and names[index].startswith("MIG-"):
        return names[index]
    uuid = getattr(cuda.get_device_properties(index), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else None


_NEW_STEP = [0, 0, ABSENT, ABSENT, 0, 0, *[0] * MAX_PHASES]
# The parts of 4096 entries, which take about 5 ms to settle.
MAX_LOG = 3 * 4096
# How long the end of the process waits for a thread that is settling the log.
FINISH_WAIT_S = 0.2


class PhaseTimes:
    """Times of phases. The training thread appends to ``log``; one thread at a time settles it.

    ``log`` holds the three parts of each entry in sequence, and ``push`` appends an entry.
    ``thread`` is the training thread's ident, 0 at first. ``current`` is the innermost phase at the
    last settled entry. ``used_by`` has the phases ``backward`` and ``forward`` once data are
    loaded: time in no phase before another backward on the same batch is its forward. Totals start
    with the first step of the process, not with its ring.
    """

    __slots__ = (
        "_end_ns", "_known_ring", "_mark_ns", "_number", "_settling", "_stack", "_totals",
        "_words", "current", "gpu", "log", "phase_names", "push", "ring", "thread", "used_by",
        "wall_offset_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.push: Callable[[Entry], None] = self.log.extend
        self.ring: RingWriter | None = None
        self.gpu: CudaSteps | None = None
        self.wall_offset_ns = 0
        self.phase_names: list[str] = []
        self.thread = 0
        self._totals = [0] * len(_NEW_STEP)
        self._settling = threading.Lock()
        self._known_ring: RingWriter | None = None
        self._words = _NEW_STEP[:]
        self._stack: list[int] = []
        self.current = OTHER
        self.used_by = (OTHER, OTHER)
        self._mark_ns = self._end_ns = 0
        self._number = 0

    @property
    def totals(self) -> list[int]:
        """The totals of all steps: count, duration ns, then ns per phase, as in a step."""
        self.settle(helping=threading.get_ident() != self.thread)
        return self._totals

    def settle(self, helping: bool = False) -> None:
        """Process the log, unless another thread does. Never raises.

        ``helping`` means not in the training thread, which alone may query a GPU.
        """
        if (helping and self.gpu is not None) or not self._settling.acquire(False):
            return
        try:
            # Once more: the training thread may have begun to use a GPU in between.
            if not (helping and self.gpu is not None):
                self._settle()
        except Exception as error:
            faults.swallow(error)
        finally:
            self._settling.release()

    def use_gpu(self, cuda: Any, pool_size: int = POOL_SIZE) -> bool:
        """Record events of this GPU from now on. Return False while another thread settles the log.

        Entries so far have no events. ``cuda`` is the module torch.cuda.
        """
        if not self._settling.acquire(False):
            return False
        try:
            self._settle()
            self.gpu = CudaSteps(cuda, self.log.extend, self._shorten, pool_size)
            self.push = self.gpu.push
        finally:
            self._settling.release()
        return True

    def _shorten(self) -> None:
        """Settle a long log in the training thread: during an evaluation no step's end does."""
        if len(self.log) > MAX_LOG and threading.get_ident() == self.thread:
            self.settle()

    def finish(self) -> None:
        """Write all steps at exit, in any thread, also those that the GPU has not finished.

        Outside the training thread they get the clock's times.
        """
        if not self._settling.acquire(timeout=FINISH_WAIT_S):
            return
        try:
            self._settle(ask_gpu=threading.get_ident() == self.thread)
            if self.gpu is not None:
                self._write(self.gpu.harvest(ask=False, flush=True))
        finally:
            self._settling.release()

    def _settle(self, ask_gpu: bool = True) -> None:
        length = len(self.log)
        parts = iter(self.log[:length])
        try:
            ended = self._add_up(zip(parts, parts, parts))
        finally:
            # After an interrupt the rest stays for the next time.
            del self.log[: length - length_hint(parts)]
        if self.gpu is not None:
            ended = self.gpu.harvest(ask_gpu)
        self._write(ended)

    def _add_up(self, entries: Iterable[Entry]) -> list[StepRow]:
        """Return the steps that have ended; on a GPU none, because ``CudaSteps`` returns them."""
        gpu, stack, event = self.gpu, self._stack, None
        words, current, mark_ns = self._words, self.current, self._mark_ns
        backward, forward = self.used_by
        ended: list[StepRow] = []
        try:
            for what, now, detail in entries:
                if what == backward and current == OTHER and not stack:
                    current = forward
                words[current] += now - mark_ns
                mark_ns = now
                if gpu is not None:
                    detail, event = detail
                    gpu.mark(what, event, current)
                if what == LEAVE:
                    current = stack.pop() if stack else OTHER
                elif what >= OTHER:
                    stack.append(current)
                    current = what
                elif what <= NEXT:
                    self._cut(what, now, detail, event, ended)
                    words, detail = self._words, OTHER
                if detail is None:
                    continue
                if stack:
                    stack[0] = detail
                else:
                    current = detail
        finally:
            self.current, self._mark_ns = current, mark_ns
        return ended

    def _cut(
        self, what: int, now: int, detail: Any, event: PooledEvent | None, ended: list[StepRow]
    ) -> None:
        """End a step, or at START discard the time until now."""
        before_ns, self._end_ns = self._end_ns, now
        words, self._words = self._words, _NEW_STEP[:]
        if what == START:
            self._stack.clear()
            if self.gpu is not None:
                self.gpu.restart()
            return
        flags, words[SAMPLES], words[TOKENS], work = detail
        words[NUMBER], words[DURATION] = self._number, now - before_ns
        self._number += 1
        step = (flags, now + self.wall_offset_ns, words, work)
        if self.gpu is None:
            ended.append(step)
        else:
            self.gpu.end(step, event, now, self.ring)

    def _write(self, steps: list[StepRow]) -> None:
        """Count and write finished steps; a new ring gets the totals even without new steps."""
        phases = len(self.phase_names)
        if steps:
            columns = [*zip(*(words for _, _, words, _ in steps))]
            totals = self._totals[:]
            totals[NUMBER] += len(steps)
            for index in (DURATION, SAMPLES, TOKENS, *range(FIRST_PHASE, FIRST_PHASE + phases)):
                totals[index] += sum(columns[index])
            self._totals = totals
        ring = self.ring
        is_new = ring is not self._known_ring and self._totals[NUMBER]
        if ring is None or not (steps or is_new):
            return
        if is_new:
            self._known_ring = ring
            for index in range(phases):
                self._define(ring, index)
        ring.write_steps(steps, self._totals, phases)

    def _define(self, ring: RingWriter, index: int) -> None:
        payload = protocol.PHASE.pack(index) + self.phase_names[index].encode()
        ring.append(protocol.RECORD_PHASE, payload)
