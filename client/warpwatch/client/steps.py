"""The step clock: what the training thread runs at every step and phase border.

It takes no lock, opens no file and waits for nothing; every nanosecond here is the user's.
Phases are disjoint: at each border the time since the last one goes to the phase that was
innermost. Index 0 is time in no phase; phase i of the ring is index i + 1 here.
"""

from __future__ import annotations

import os
import sys
from numbers import Real
from operator import add
from queue import SimpleQueue
from threading import get_ident
from time import monotonic_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any, Optional

from warpwatch.client import faults, identity, protocol
from warpwatch.client.protocol import ABSENT, MAX_PHASES, WORD_STEP_BEGUN, WORD_STEP_BEGUN_AT

if TYPE_CHECKING:
    from warpwatch.client.captures import TorchCaptures
    from warpwatch.client.cuda_steps import CudaSteps
    from warpwatch.client.ring import RingWriter

_pread = os.pread


class StepClock:
    """Measures steps and phases of one thread, and is the context manager of a step.

    The totals are the process's: they begin with its first step, not with its ring.
    """

    def __init__(self) -> None:
        self.ring: Optional[RingWriter] = None
        self.captures: Optional[TorchCaptures] = None
        self.gpu: Optional[CudaSteps] = None
        self.begun = 0  # the step now begun, plus 1
        self.begun_ns = 0
        self.wall_offset_ns = 0
        self.flags = 0
        self.capturing = False
        self.samples = 0
        self.tokens = 0
        self.steps = 0
        self.phase_names: list[str] = []
        self.totals = [0]  # ns by phase index
        self.spent = [0]  # ns by phase index, of the step now running
        self.current = 0
        self.mark_ns = 0
        self.stack: list[int] = []
        self.thread = 0
        self.woken: SimpleQueue[None] = SimpleQueue()
        self._duration_ns = self._samples = self._tokens = 0
        self._known_ring: Optional[RingWriter] = None
        self.open = self._dead = False
        self._nested = 0
        self._end_ns = 0
        self._first: Optional[int] = None

    # --- the hot path ---------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins. Inside another one, and in another thread, it counts for nothing."""
        try:
            if get_ident() != self.thread and not self._adopt():
                return
            if self.open:
                self._nested += 1
                return
            now = monotonic_ns()
            if self._end_ns == 0:
                self._start(now)
            self.open = True
            number = self.steps
            self.begun_ns = now
            self.begun = number + 1
            ring = self.ring
            if ring is not None:
                if ring is not self._known_ring:
                    self._meet(ring)
                words = ring.words
                words[WORD_STEP_BEGUN_AT] = now
                words[WORD_STEP_BEGUN] = number + 1
                self._look_at_command(ring, number)
            if self.gpu is not None:
                self.gpu.begin(self.current)
        except Exception as error:
            faults.swallow(error)

    def end(self) -> None:
        """The step ends."""
        if get_ident() != self.thread:
            return
        try:
            if self._nested or not self.open:
                self._nested -= self._nested > 0
                return
            now = monotonic_ns()
            spent = self.spent
            spent[self.current] += now - self.mark_ns
            self.mark_ns = now
            number = self.steps
            duration = now - self._end_ns
            self._end_ns = now
            self.open = False
            self.steps = number + 1
            wall = now + self.wall_offset_ns
            step = (number, duration, ABSENT, ABSENT, self.samples, self.tokens)
            if self.gpu is None:
                self.finish(self.flags, wall, step, spent)
            else:
                self.gpu.end(self, wall, step, spent)
            self.spent = [0] * len(spent)
            self.samples = self.tokens = 0
            if self.capturing and self.captures is not None:
                self.captures.step_ended(self, number)
        except Exception as error:
            faults.swallow(error)

    def finish(self, flags: int, wall_ns: int, step: tuple[int, ...], spent: list[int]) -> None:
        """Count a step whose times are known, in order, and write it."""
        self.totals = totals = list(map(add, self.totals, spent))
        self._duration_ns += step[1]
        self._samples += step[4]
        self._tokens += step[5]
        ring = self.ring
        if ring is not None:
            newest = step[0] + 1
            ring.write_step(flags, wall_ns, step, spent[1:])
            ring.write_totals(
                newest, newest, self._samples, self._tokens, self._duration_ns, totals[1:]
            )

    def enter_phase(self, index: int) -> None:
        if get_ident() == self.thread:
            current = self.current
            now = monotonic_ns()
            self.spent[current] += now - self.mark_ns
            self.mark_ns = now
            self.stack.append(current)
            self.current = index
            if self.gpu is not None:
                self.gpu.border(current)

    def exit_phase(self) -> None:
        if get_ident() == self.thread and self.stack:
            current = self.current
            now = monotonic_ns()
            self.spent[current] += now - self.mark_ns
            self.mark_ns = now
            self.current = self.stack.pop()
            if self.gpu is not None:
                self.gpu.border(current)

    def _look_at_command(self, ring: RingWriter, number: int) -> None:
        fd = ring.command_fd
        captures = self.captures
        if captures is None:
            return
        if fd >= 0 and _pread(fd, 8, 8) != ring.command_seen:
            captures.read_command(self, ring, number)
        if self.capturing:
            captures.step_begins(self, number)

    # --- what happens seldom --------------------------------------------------------------------

    def __enter__(self) -> StepClock:
        self.begin()
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if error is None:
            self.end()
        else:
            self._abandon(error)

    def count(self, samples: int = 0, tokens: int = 0) -> None:
        """Add to what this step has processed, where it is not known at its begin."""
        self.samples += whole(samples)
        self.tokens += whole(tokens)

    def phase_index(self, name: str) -> int:
        """The index of a phase, 0 when there are MAX_PHASES others: its time is `other` then."""
        name = identity.bounded(str(name), 64, identity.MAX_PHASE_BYTES)
        if name in self.phase_names:
            return self.phase_names.index(name) + 1
        if len(self.phase_names) >= MAX_PHASES or self._dead:
            return 0
        self.totals = [*self.totals, 0]
        self.spent.append(0)
        self.phase_names.append(name)
        if self._known_ring is not None:
            self._define(self._known_ring, len(self.phase_names) - 1)
        return len(self.phase_names)

    def drop(self) -> None:
        """In a forked child: nothing is measured any more."""
        self._dead = True
        self.thread = 0
        self.ring = self._known_ring = self.gpu = self.captures = None

    def _adopt(self) -> bool:
        """The first thread that begins a step is the training thread for as long as it lives."""
        if self._dead or (self.thread and self.thread in sys._current_frames()):
            return False
        self.thread = get_ident()
        self.open = False
        self._nested = self.current = 0
        self.stack.clear()
        return True

    def _start(self, now: int) -> None:
        self._end_ns = self.mark_ns = now
        self.spent = [0] * len(self.totals)
        self.woken.put(None)

    def _meet(self, ring: RingWriter) -> None:
        self._known_ring = ring
        for index in range(len(self.phase_names)):
            self._define(ring, index)

    def _define(self, ring: RingWriter, index: int) -> None:
        payload = protocol.PHASE.pack(index) + self.phase_names[index].encode()
        ring.append(protocol.RECORD_PHASE, payload)

    def _abandon(self, error: BaseException) -> None:
        """An exception ended the step: it does not count, its time goes to the next one."""
        try:
            if get_ident() != self.thread:
                return
            if self._nested:
                self._nested -= 1
                return
            self.open = False
            self.samples = self.tokens = 0
            if self.ring is not None and is_out_of_memory(error):
                self.ring.event("oom", detail=str(error)[:100])
        except Exception as fault:
            faults.swallow(fault)


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def whole(value: Any) -> int:
    """A count that the ring can hold. A tensor counts 0: to read one could wait for the GPU."""
    if not isinstance(value, Real):
        return 0
    try:
        return min(max(int(value), 0), 1 << 48)
    except (ValueError, OverflowError):
        return 0
