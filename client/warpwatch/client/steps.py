"""The step clock: what the training thread runs at every step and phase border.

It takes no lock, opens no file and waits for nothing; every nanosecond here is the user's.
Phases are disjoint: at each border the time since the last one goes to the phase that was
innermost.
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
from typing import TYPE_CHECKING, Any

from warpwatch.client import faults, identity, protocol
from warpwatch.client.cuda_steps import DURATION, CudaSteps, device_uuid
from warpwatch.client.protocol import ABSENT, MAX_PHASES, WORD_STEP_BEGUN, WORD_STEP_BEGUN_AT

if TYPE_CHECKING:
    from warpwatch.client.captures import TorchCaptures
    from warpwatch.client.ring import RingWriter

# What a forked child inherited and must not destroy: a CUDA event's end calls the driver, which
# may not be used after a fork.
_kept_in_child: list[Any] = []

# Steps shorter than this do not all look for a command: the look is a system call.
COMMAND_INTERVAL_NS = 1_000_000

# What a step adds to the totals, in the order of the ring's totals: a step, the newest step
# plus 1, then these, then ns of each phase. Until the step's end the place of its duration
# holds the time spent in no phase.
SAMPLES, TOKENS, FIRST_PHASE = 2, 3, DURATION + 1
OTHER = DURATION


class StepClock:
    """Measures steps and phases of one thread, and is the context manager of a step.

    The totals are the process's: they begin with its first step, not with its ring.
    """

    __slots__ = (
        "_blank", "_dead", "_end_ns", "_gpu_tried", "_known_ring", "_look_ns", "_nested",
        "begun", "begun_ns", "captures", "capturing", "cuda", "current", "device", "flags",
        "gpu", "mark_ns", "open", "phase_names", "ring", "samples", "spent", "stack", "steps",
        "thread", "tokens", "totals", "wall_offset_ns", "woken",
    )  # fmt: skip

    def __init__(self) -> None:
        self.ring: RingWriter | None = None
        self.captures: TorchCaptures | None = None
        self.cuda: Any = None  # torch.cuda, once the helper thread saw that it is in use
        self.gpu: CudaSteps | None = None
        self.device: str | None = None
        self.begun = 0  # the step now begun, plus 1
        self.begun_ns = 0
        self.wall_offset_ns = 0
        self.flags = 0
        self.capturing = False
        self.samples = 0
        self.tokens = 0
        self.steps = 0
        self.phase_names: list[str] = []
        self._blank = [1, 1, 0, 0, 0]
        self.totals = [0] * len(self._blank)
        self.spent = self._blank[:]
        self.current = OTHER
        self.mark_ns = 0
        self.stack: list[int] = []
        self.thread = 0
        self.woken: SimpleQueue[None] = SimpleQueue()
        self._known_ring: RingWriter | None = None
        self.open = self._dead = False
        self._nested = 0
        self._end_ns = self._look_ns = 0
        self._gpu_tried = False

    # --- the hot path ---------------------------------------------------------------------------

    def begin(self) -> StepClock:
        """A step begins. Inside another one, and in another thread, it counts for nothing."""
        try:
            if get_ident() != self.thread and not self._adopt():
                return self
            if self.open:
                self._nested += 1
                return self
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
                if self.capturing or now >= self._look_ns:
                    self._look_ns = now + COMMAND_INTERVAL_NS
                    self._follow_captures(ring, number)
            if self.cuda is not None:
                self._begin_on_gpu()
        except Exception as error:
            faults.swallow(error)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """The step ends. One that an exception leaves is not counted."""
        try:
            if get_ident() != self.thread:
                return
            if self._nested or error is not None or not self.open:
                self._leave(error)
                return
            now = monotonic_ns()
            self.open = False
            spent = self.spent
            self.spent = self._blank[:]
            spent[self.current] += now - self.mark_ns
            self.mark_ns = now
            spent[SAMPLES] = self.samples
            spent[TOKENS] = self.tokens
            spent[DURATION] = now - self._end_ns
            self._end_ns = now
            number = self.steps
            self.steps = number + 1
            wall_ns = now + self.wall_offset_ns
            if self.gpu is not None:
                self.gpu.end(self, wall_ns, number, spent)
            else:
                # As in finish(), without the call.
                self.totals = totals = list(map(add, self.totals, spent))
                ring = self.ring
                if ring is not None:
                    if ring is not self._known_ring:
                        self._meet(ring)
                    flags = self.flags
                    ring.write_step(flags, wall_ns, number, ABSENT, ABSENT, spent, totals)
            if self.capturing and self.captures is not None:
                self.captures.step_ended(self, number)
        except Exception as fault:
            faults.swallow(fault)

    __enter__ = begin

    def finish(
        self, flags: int, wall_ns: int, number: int, gpu_ns: int, allocated: int, spent: list[int]
    ) -> None:
        """Count a step whose times are known, in order, and write it."""
        self.totals = totals = list(map(add, self.totals, spent))
        ring = self.ring
        if ring is not None:
            if ring is not self._known_ring:
                self._meet(ring)
            ring.write_step(flags, wall_ns, number, gpu_ns, allocated, spent, totals)

    # --- what happens seldom --------------------------------------------------------------------

    def end(self) -> None:
        """The step ends, where there is no ``with``."""
        self.__exit__(None, None, None)

    def switch(self, index: int) -> None:
        """What runs between phases is the phase ``index`` from now on, OTHER by default."""
        if get_ident() != self.thread:
            return
        now = monotonic_ns()
        current = self.current
        self.spent[current] += now - self.mark_ns
        self.mark_ns = now
        if self.stack:
            self.stack[0] = index
        else:
            self.current = index
        if self.gpu is not None:
            self.gpu.border(current)

    def count(self, samples: int = 0, tokens: int = 0) -> None:
        """Add to what this step has processed, where it is not known at its begin."""
        self.samples += whole(samples)
        self.tokens += whole(tokens)

    def phase_index(self, name: str) -> int:
        """Where the phase's time is summed; OTHER when there are MAX_PHASES before it."""
        name = identity.phase_name(str(name))
        if name in self.phase_names:
            return FIRST_PHASE + self.phase_names.index(name)
        number = len(self.phase_names)
        foreign = self.thread not in (0, get_ident())
        if number >= MAX_PHASES or self._dead or foreign:
            return OTHER
        for row in (self.totals, self.spent, self._blank):
            row.append(0)
        self.phase_names.append(name)
        if self._known_ring is not None:
            self._define(self._known_ring, number)
        return FIRST_PHASE + number

    def drop(self) -> None:
        """In a forked child: nothing is measured any more."""
        self._dead = True
        self.thread = 0
        _kept_in_child.append((self.gpu, self.captures))
        self.ring = self._known_ring = self.gpu = self.captures = None

    def _adopt(self) -> bool:
        """The first thread that begins a step is the training thread for as long as it lives."""
        if self._dead or (self.thread and self.thread in sys._current_frames()):
            return False
        self.thread = get_ident()
        self.open = False
        self._nested = 0
        self.current = OTHER
        self.stack.clear()
        return True

    def _begin_on_gpu(self) -> None:
        if not self._gpu_tried:
            self._gpu_tried = True
            self.gpu = CudaSteps(self.cuda)
            self.device = device_uuid(self.cuda, os.environ.get("CUDA_VISIBLE_DEVICES"))
        if self.gpu is not None:
            self.gpu.begin(self.current)

    def _start(self, now: int) -> None:
        self._end_ns = self.mark_ns = now
        self.spent = self._blank[:]
        self.woken.put(None)

    def _meet(self, ring: RingWriter) -> None:
        self._known_ring = ring
        for index in range(len(self.phase_names)):
            self._define(ring, index)

    def _define(self, ring: RingWriter, index: int) -> None:
        payload = protocol.PHASE.pack(index) + self.phase_names[index].encode()
        ring.append(protocol.RECORD_PHASE, payload)

    def _follow_captures(self, ring: RingWriter, number: int) -> None:
        captures = self.captures
        if captures is None:
            return
        fd = ring.command_fd
        if fd >= 0 and os.pread(fd, 8, 8) != ring.command_seen:
            captures.read_command(self, ring, number)
        if self.capturing:
            captures.step_begins(self, number)

    def _leave(self, error: BaseException | None) -> None:
        """A nested step, or one that failed: it does not count, its time goes to the next one."""
        if self._nested:
            self._nested -= 1
        elif self.open:
            self.open = False
            if self.ring is not None and error is not None and is_out_of_memory(error):
                self.ring.event("oom", detail=str(error)[:100])


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def whole(value: Any) -> int:
    """A count that the ring can hold. A tensor counts 0: to read one could wait for the GPU."""
    if not isinstance(value, Real):
        return 0
    try:
        return min(max(int(float(value)), 0), 1 << 48)
    except (ValueError, OverflowError):
        return 0
