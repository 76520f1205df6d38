"""Turns the training thread's log of boundaries into phases, steps, totals and records.

Phases are disjoint: at each boundary the time since the last one goes to the innermost phase.
Without a GPU the helper thread settles the log too: a step that ended before a hang is written.

On a GPU each boundary also records a CUDA event of a reused pool on the stream that was current at
the step's start: collectives and prefetching have other streams, and time between two streams
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
# What happened; what is none of these is the index of the phase that is entered. NEXT: a step ends,
# and the next one begins.
LEAVE, SWITCH, BEGIN, NEXT, END, START = -1, -2, -3, -4, -5, -6
# What happened, when (monotonic, ns), and a detail. At NEXT and END: flags, samples and tokens of
# the step. Elsewhere the phase that runs between phases from now on, None where that stays as it
# is. On a GPU the detail is a pair: that, and the event recorded at the border.
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


# A border's event, and the phase that ran until then.
_Mark = tuple[PooledEvent, int]
# A step that is not read back yet, the marks since the step before, where it began, and where the
# step before ended. The marks end with its own end; none: only the clock's times hold.
_PendingStep = tuple[StepRow, list[_Mark], Optional[PooledEvent], Optional[PooledEvent]]


class CudaSteps:
    """``cuda`` is the module torch.cuda: Event, streams, memory statistics.

    Events belong to the device on which they were first recorded, so each device has a pool. They
    are recorded as the program comes to a border; to which phase and step one belongs is known
    later, in the same order, when the log is settled.
    """

    def __init__(self, cuda: Any, log: Callable[[Entry], None], pool_size: int = POOL_SIZE) -> None:
        """``log`` appends an entry."""
        self._cuda = cuda
        self._log = log
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

    # --- at the borders -------------------------------------------------------------------------

    def push(self, entry: Entry) -> None:
        """Note a border with its event, None where there can be none.

        Borders at the same time share one: the end of a phase and that of its step.
        """
        what, now, detail = entry
        if now != self._recorded_ns:
            self._recorded, self._recorded_ns = None, now
            try:
                if self._free and not self._cuda.is_current_stream_capturing():
                    event = self._free.popleft()
                    event.event.record(self._stream)
                    self._recorded = event
            except Exception as error:
                faults.swallow(error)
        self._log((what, now, (detail, self._recorded)))

    def follow_stream(self) -> None:
        """A step begins: its events are on the stream that is current now. Never raises."""
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

    def border(self, what: int, event: PooledEvent | None, phase: int) -> None:
        """``phase`` was innermost until now."""
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
        begins: bool,
    ) -> None:
        """The step ended ``now`` on the CPU; it is finished when the GPU has come that far.

        ``begins``: the next one begins there.
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
        self._previous_end, self._begin, self._marks = event, event if begins else None, []
        self._whole = True

    def restart(self) -> None:
        """What has run belongs to no step: the times of the next one begin with itself."""
        _release([event for event, _ in self._marks])
        self._begin = self._previous_end = None
        self._marks = []
        self._whole = False

    def harvest(self, ask: bool, flush: bool = False) -> list[StepRow]:
        """The steps that the GPU has completed, oldest first.

        With ``flush``, and where too many wait, the rest with the clock's times. Without ``ask``,
        in another thread than the training's, no event is asked, nor while a graph is captured.
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
        """Allocated bytes, and a memory record beside it; ABSENT if it was read a moment ago.

        The statistics are counters that the allocator keeps: nothing waits for the GPU. Allocators
        plugged in by the program may have none.
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
        """One that the program caught is reported here; each rise of the counter once."""
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
        # A GPU that failed: the program hears of it by itself.
        faults.swallow(error)
        return False


def _measure(
    words: list[int], marks: list[_Mark], begin: PooledEvent, previous_end: PooledEvent
) -> None:
    """Put the GPU's times in place of the clock's."""
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


def device_uuid(cuda: Any, visible: str | None) -> str | None:
    """The UUID of the calling thread's device. ``visible`` is CUDA_VISIBLE_DEVICES."""
    index: int = cuda.current_device()
    names = [name.strip() for name in (visible or "").split(",")]
    if index < len(names) and names[index].startswith("MIG-"):
        return names[index]
    uuid = getattr(cuda.get_device_properties(index), "uuid", None)
    return f"GPU-{uuid}" if uuid is not None else None


_NEW_STEP = [0, 0, ABSENT, ABSENT, 0, 0, *[0] * MAX_PHASES]
# How long the end of the process waits for a thread that is settling the log.
FINISH_WAIT_S = 0.2


class PhaseTimes:
    """``log`` is appended to by the training thread and settled by one thread at a time.

    log: the three parts of each entry, one after the other. push: how an entry gets there.
    thread: the training thread's identity, 0 before there is one. current: the innermost phase as
    far as the log is settled. used_by: the phases ``backward`` and ``forward``, once data are
    loaded: what runs in no phase before another backward on the same batch is its forward.

    The totals are the process's: they begin with its first step, not with its ring.
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
        """Of all steps until now, where a step's words lie: how many, duration ns, phases ns, …"""
        self.settle(helping=threading.get_ident() != self.thread)
        return self._totals

    @property
    def words(self) -> list[int]:
        """Those of the running step, up to the last border that is settled."""
        self.settle(helping=threading.get_ident() != self.thread)
        return self._words

    def settle(self, helping: bool = False) -> None:
        """Take over what the log holds, unless another thread is about it. Never raises.

        ``helping``: in another thread than the training's, which alone may ask a GPU.
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
        """Borders are events of this GPU from now on. False while another thread settles the log.

        What it holds then are borders without events. ``cuda`` is the module torch.cuda.
        """
        if not self._settling.acquire(False):
            return False
        try:
            self._settle()
            self.gpu = CudaSteps(cuda, self.log.extend, pool_size)
            self.push = self.gpu.push
        finally:
            self._settling.release()
        return True

    def finish(self) -> None:
        """At the end of the process, in any thread: what a GPU has not come to is written as well.

        With the clock's times, unless this is the training thread.
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
            # Whoever is interrupted leaves the rest for the next time.
            del self.log[: length - length_hint(parts)]
        if self.gpu is not None:
            ended = self.gpu.harvest(ask_gpu)
        self._write(ended)

    def _add_up(self, entries: Iterable[Entry]) -> list[StepRow]:
        """The steps that have ended; those of a GPU are left to it."""
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
                    gpu.border(what, event, current)
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
        """A step ends, or (START) what ran until now belongs to none."""
        before_ns, self._end_ns = self._end_ns, now
        words, self._words = self._words, _NEW_STEP[:]
        if what == START:
            self._stack.clear()
            if self.gpu is not None:
                self.gpu.restart()
            return
        flags, words[SAMPLES], words[TOKENS] = detail
        words[NUMBER], words[DURATION] = self._number, now - before_ns
        self._number += 1
        step = (flags, now + self.wall_offset_ns, words)
        if self.gpu is None:
            ended.append(step)
        else:
            self.gpu.end(step, event, now, self.ring, begins=what == NEXT)

    def _write(self, steps: list[StepRow]) -> None:
        """Count steps whose times are known, in order, and write them; a new ring gets the totals
        also if no step comes any more."""
        phases = len(self.phase_names)
        if steps:
            columns = [*zip(*(words for _, _, words in steps))]
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
