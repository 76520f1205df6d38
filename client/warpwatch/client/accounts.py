"""The log of a training thread's borders, and what it adds up to: phases, steps, totals, records.

Phases are disjoint: at each border the time since the last one goes to the phase that was
innermost. Without a GPU the helper thread settles the log too, so that a step that ended just
before a hang is seen.
"""

from __future__ import annotations

import threading
from collections import deque
from operator import add
from typing import TYPE_CHECKING

from warpwatch.client import faults, protocol
from warpwatch.client.cuda_steps import DURATION, CudaSteps
from warpwatch.client.protocol import ABSENT, MAX_PHASES

if TYPE_CHECKING:
    from warpwatch.client.ring import RingWriter, Row

# What a step adds to the totals, in the order of the ring's totals: a step, the newest step
# plus 1, then these, then ns of each phase. Until the step's end the place of its duration
# holds the time spent in no phase.
SAMPLES, TOKENS, FIRST_PHASE = 2, 3, DURATION + 1
OTHER = DURATION
_BLANK = [1, 1, 0, 0, 0, *[0] * MAX_PHASES]

# Entries of the log begin with what happened and the time of it in ns. Where it is none of these,
# it is the index of the phase that is entered. A third item, which SWITCH has and a phase's begin
# or end may have, is the phase that what runs between phases is from now on.
END, START, LEAVE, SWITCH = 0, 1, -1, -2


class Accounts:
    """``log`` is appended to by the training thread and settled by one thread at a time.

    thread: the training thread's identity, 0 before there is one. current: the innermost phase as
    far as the log is settled.

    The totals are the process's: they begin with its first step, not with its ring.
    """

    __slots__ = (
        "_end_ns", "_known_ring", "_mark_ns", "_number", "_settling", "_spent", "_stack",
        "_totals", "current", "gpu", "log", "phase_names", "ring", "thread", "wall_offset_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.log: deque[tuple[int, ...]] = deque()
        self.ring: RingWriter | None = None
        self.gpu: CudaSteps | None = None
        self.wall_offset_ns = 0
        self.phase_names: list[str] = []
        self.thread = 0
        self._totals = [0] * len(_BLANK)
        self._settling = threading.Lock()
        self._known_ring: RingWriter | None = None
        self._spent = _BLANK[:]
        self._stack: list[int] = []
        self.current = OTHER
        self._mark_ns = self._end_ns = 0
        self._number = 0

    @property
    def totals(self) -> list[int]:
        """Of all steps until now: steps, newest plus 1, samples, tokens, duration ns, phases ns."""
        self.settle(helping=threading.get_ident() != self.thread)
        return self._totals

    @property
    def spent(self) -> list[int]:
        """What the running step adds to the totals, as far as its phases have ended."""
        self.settle(helping=threading.get_ident() != self.thread)
        return self._spent

    def settle(self, helping: bool = False) -> None:
        """Take over what the log holds; left to who does so already. ``helping``: from another
        thread than the training's, which alone may talk to CUDA. Never raises."""
        gpu = self.gpu
        if (helping and gpu is not None) or not self._settling.acquire(False):
            return
        try:
            self._settle(gpu)
        except Exception as error:
            faults.swallow(error)
        finally:
            self._settling.release()

    def _settle(self, gpu: CudaSteps | None) -> None:
        """``gpu`` is asked for once: meanwhile the training thread may begin to use it."""
        log, stack = self.log, self._stack
        popleft = log.popleft
        spent, current, mark_ns = self._spent, self.current, self._mark_ns
        rows: list[Row] = []
        try:
            for _ in range(len(log)):
                entry = popleft()
                what, now, before = entry[0], entry[1], current
                spent[current] += now - mark_ns
                mark_ns = now
                if what >= OTHER:
                    stack.append(current)
                    current = what
                elif what >= 0:
                    self._cut(entry, spent, current, rows, gpu)
                    spent = _BLANK[:]
                    if what == START:
                        current = OTHER
                    continue
                elif what == LEAVE:
                    current = stack.pop() if stack else OTHER
                if len(entry) > 2:
                    if stack:
                        stack[0] = entry[2]
                    else:
                        current = entry[2]
                if gpu is not None:
                    gpu.border(before)
        finally:
            self._spent, self.current, self._mark_ns = spent, current, mark_ns
        if rows:
            self._write(rows)

    def _cut(
        self,
        entry: tuple[int, ...],
        spent: list[int],
        current: int,
        rows: list[Row],
        gpu: CudaSteps | None,
    ) -> None:
        """A step ends and counts, or what ran until now belongs to none."""
        now, before, self._end_ns = entry[1], self._end_ns, entry[1]
        self.current = current
        if entry[0] == START:
            self._stack.clear()
            if gpu is not None:
                gpu.restart()
            return
        flags, spent[SAMPLES], spent[TOKENS] = entry[2:]
        spent[DURATION] = now - before
        number, wall_ns = self._number, now + self.wall_offset_ns
        self._number = number + 1
        if gpu is not None:
            gpu.end(self, flags, wall_ns, number, spent)
        else:
            rows.append((flags, wall_ns, number, ABSENT, ABSENT, spent))

    def finish(
        self, flags: int, wall_ns: int, number: int, gpu_ns: int, allocated: int, spent: list[int]
    ) -> None:
        """Count a step whose times are known, in order, and write it."""
        self._write([(flags, wall_ns, number, gpu_ns, allocated, spent)])

    def _write(self, rows: list[Row]) -> None:
        totals = self._totals
        for row in rows:
            totals = list(map(add, totals, row[5]))
        self._totals = totals
        ring = self.ring
        if ring is not None:
            if ring is not self._known_ring:
                self._meet(ring)
            ring.write_steps(rows, totals, FIRST_PHASE + len(self.phase_names))

    def _meet(self, ring: RingWriter) -> None:
        self._known_ring = ring
        for index in range(len(self.phase_names)):
            self._define(ring, index)

    def _define(self, ring: RingWriter, index: int) -> None:
        payload = protocol.PHASE.pack(index) + self.phase_names[index].encode()
        ring.append(protocol.RECORD_PHASE, payload)
