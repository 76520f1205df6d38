"""The log of a training thread's borders, and what it adds up to: phases, steps, totals, records.

Phases are disjoint: at each border the time since the last one goes to the phase that was
innermost. Without a GPU the helper thread settles the log too, so that a step that ended just
before a hang is seen.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

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

# Entries of the log: what happened, the time of it in ns, and a detail. What is none of these is
# the index of the phase that is entered. LAST: a phase ends, with it the step, and none runs
# between phases from now on. Detail: flags, samples and tokens where a step ends; elsewhere the
# phase that what runs between phases is from now on, None where that stays.
# LAP: such a step as a whole, in the phases of ``run_laps``. Detail: when the first of them began
# and ended, the third did, the last began; samples and tokens.
END, LAST, START, LAP, LEAVE, SWITCH = 0, 1, 2, 3, -1, -2
Entry = tuple[int, int, Any]
LapPhases = tuple[int, int, int, int]


class Accounts:
    """``log`` is appended to by the training thread and settled by one thread at a time.

    thread: the training thread's identity, 0 before there is one. current: the innermost phase as
    far as the log is settled.

    The totals are the process's: they begin with its first step, not with its ring.
    """

    __slots__ = (
        "_end_ns", "_known_ring", "_lap_phases", "_mark_ns", "_number", "_settling", "_spent",
        "_stack", "_totals", "current", "gpu", "log", "phase_names", "ring", "thread",
        "wall_offset_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.log: deque[Entry] = deque()
        self.ring: RingWriter | None = None
        self.gpu: CudaSteps | None = None
        self.wall_offset_ns = 0
        self.phase_names: list[str] = []
        self.thread = 0
        self._totals = [0] * len(_BLANK)
        self._settling = threading.Lock()
        self._known_ring: RingWriter | None = None
        self._spent = _BLANK[:]
        self._lap_phases: LapPhases = OTHER, OTHER, OTHER, OTHER
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
        """What the running step adds to the totals, up to the last border that is settled."""
        self.settle(helping=threading.get_ident() != self.thread)
        return self._spent

    def run_laps(self, phases: LapPhases) -> bool:
        """Laps have these phases from now on: wait for data, what follows, backward, optimizer.

        Not where they would run inside of another phase.
        """
        self.settle()
        if self.log or self._stack or self.current != OTHER:
            return False
        self._lap_phases = phases
        return True

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
                what, now, detail = popleft()
                if what == LAP:
                    rows.append(self._lap(now, detail))
                    mark_ns = now
                    continue
                spent[current] += now - mark_ns
                mark_ns = now
                if gpu is not None and not END <= what <= START:
                    gpu.border(current)
                if what >= OTHER:
                    stack.append(current)
                    current = what
                elif what >= END:
                    self._cut(what, now, detail, spent, current, rows, gpu)
                    spent = _BLANK[:]
                    if what == END:
                        continue
                    current, detail = stack.pop() if stack else OTHER, OTHER
                elif what == LEAVE:
                    current = stack.pop() if stack else OTHER
                if detail is not None:
                    if stack:
                        stack[0] = detail
                    else:
                        current = detail
        finally:
            self._spent, self.current, self._mark_ns = spent, current, mark_ns
        self._write(rows)

    def _lap(self, now: int, detail: Any) -> Row:
        """A whole lap. It begins in no phase, as it ends; what is in none need not be summed."""
        asked, given, called, returned, updated, samples, tokens = detail
        data, forward, backward, optimizer = self._lap_phases
        spent = _BLANK[:]
        spent[SAMPLES], spent[TOKENS] = samples, tokens
        spent[data] = given - asked
        spent[forward] = called - given
        spent[backward] = returned - called
        spent[optimizer] = now - updated
        spent[DURATION] = now - self._end_ns
        self._end_ns = now
        number = self._number
        self._number = number + 1
        return 0, now + self.wall_offset_ns, number, ABSENT, ABSENT, spent

    def _cut(
        self,
        what: int,
        now: int,
        detail: Any,
        spent: list[int],
        current: int,
        rows: list[Row],
        gpu: CudaSteps | None,
    ) -> None:
        """A step ends and counts, or what ran until now belongs to none."""
        before, self._end_ns = self._end_ns, now
        if what == START:
            self._stack.clear()
            if gpu is not None:
                gpu.restart()
            return
        flags, spent[SAMPLES], spent[TOKENS] = detail
        spent[DURATION] = now - before
        number, wall_ns = self._number, now + self.wall_offset_ns
        self._number = number + 1
        if gpu is not None:
            self.current = current
            gpu.end(self, flags, wall_ns, number, spent)
        else:
            rows.append((flags, wall_ns, number, ABSENT, ABSENT, spent))

    def finish(
        self, flags: int, wall_ns: int, number: int, gpu_ns: int, allocated: int, spent: list[int]
    ) -> None:
        """Count a step whose times are known, in order, and write it."""
        self._write([(flags, wall_ns, number, gpu_ns, allocated, spent)])

    def _write(self, rows: list[Row]) -> None:
        if not rows:
            return
        length = FIRST_PHASE + len(self.phase_names)
        totals = self._totals
        # All that is in use, column by column.
        columns = zip(totals[:length], *[row[5] for row in rows])
        self._totals = totals = [*map(sum, columns), *totals[length:]]
        ring = self.ring
        if ring is not None:
            if ring is not self._known_ring:
                self._meet(ring)
            ring.write_steps(rows, totals, length)

    def _meet(self, ring: RingWriter) -> None:
        self._known_ring = ring
        for index in range(len(self.phase_names)):
            self._define(ring, index)

    def _define(self, ring: RingWriter, index: int) -> None:
        payload = protocol.PHASE.pack(index) + self.phase_names[index].encode()
        ring.append(protocol.RECORD_PHASE, payload)
