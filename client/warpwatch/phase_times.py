"""The log of a training thread's borders, and what it adds up to: phases, steps, totals, records.

Phases are disjoint: at each border the time since the last one goes to the phase that was
innermost. Without a GPU the helper thread settles the log too, so that a step that ended just
before a hang is seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from itertools import repeat
from operator import add
from typing import TYPE_CHECKING, Any

from warpwatch import faults, protocol
from warpwatch.columns import (
    DURATION,
    LAP_LENGTH,
    SAMPLES,
    TOKENS,
    LapPhases,
    Steps,
    spent_in_laps,
    spent_in_phases,
)
from warpwatch.cuda_steps import CudaSteps
from warpwatch.protocol import ABSENT, MAX_PHASES

if TYPE_CHECKING:
    from warpwatch.ring import RingWriter

FIRST_PHASE = DURATION + 1
# Until the step's end the place of its duration holds the time spent in no phase.
OTHER = DURATION
_BLANK = [1, 1, 0, 0, 0, *[0] * MAX_PHASES]

# Entries of the log: what happened, the time of it in ns, and a detail, one after the other. What
# is none of these is the index of the phase that is entered. LAST: a phase ends, with it the step,
# and none runs between phases from now on. Detail: flags, samples and tokens where a step ends;
# elsewhere the phase that what runs between phases is from now on, None where that stays.
END, LAST, START, LEAVE, SWITCH = 0, 1, 2, -1, -2
Entry = tuple[int, int, Any]
_ENTRY_LENGTH = 3
# What is left of a step to be written: flags, wall clock ns, number, what it adds to the totals.
_Row = tuple[int, int, int, list[int]]
# Steps that are settled at once: no more than a ring holds, and no longer a pause.
_MAX_STEPS = 256


class Accounts:
    """``log`` is appended to by the training thread and settled by one thread at a time.

    thread: the training thread's identity, 0 before there is one. current: the innermost phase as
    far as the log is settled.

    The totals are the process's: they begin with its first step, not with its ring.
    """

    __slots__ = (
        "_end_ns", "_known_ring", "_lap_phases", "_laps", "_mark_ns", "_number", "_settling",
        "_spent", "_stack", "_totals", "current", "gpu", "log", "phase_names", "ring", "thread",
        "wall_offset_ns",
    )  # fmt: skip

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.ring: RingWriter | None = None
        self.gpu: CudaSteps | None = None
        self.wall_offset_ns = 0
        self.phase_names: list[str] = []
        self.thread = 0
        self._totals = [0] * len(_BLANK)
        self._settling = threading.Lock()
        self._known_ring: RingWriter | None = None
        self._spent = _BLANK[:]
        self._laps: list[int] = []
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

    def run_laps(self, laps: list[int], phases: LapPhases) -> bool:
        """What is appended to ``laps`` from now on are steps in these phases (columns.py).

        Not where they would run inside of another phase.
        """
        self.settle()
        if self.log or self._stack or self.current != OTHER:
            return False
        self._laps, self._lap_phases = laps, phases
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
        # Laps begin with an empty log: those that are there later came before what it holds now.
        length = len(self.log)
        while len(self._laps) >= LAP_LENGTH:
            self._settle_laps()
        while length >= _ENTRY_LENGTH:
            length -= (gpu is None and self._settle_alike(length)) or self._settle_each(length, gpu)

    def _settle_laps(self) -> None:
        laps = self._laps
        length = min(len(laps) // LAP_LENGTH, _MAX_STEPS) * LAP_LENGTH
        columns = FIRST_PHASE + len(self.phase_names)
        settled = laps[:length]
        del laps[:length]
        spent = spent_in_laps(settled, self._lap_phases, self._end_ns, columns)
        self._count(repeat(0), settled[LAP_LENGTH - 1 :: LAP_LENGTH], spent)

    def _settle_alike(self, length: int) -> int:
        """Steps with the same borders, as most have. Returns how much of the log they were."""
        log = self.log
        happened = log[:length:_ENTRY_LENGTH]
        cuts = (place for place, what in enumerate(happened, 1) if END <= what <= START)
        borders = next(cuts, length)
        steps = min(len(happened) // borders, _MAX_STEPS)
        length = steps * borders * _ENTRY_LENGTH
        details = log[2:length:_ENTRY_LENGTH]
        ends = details[borders - 1 :: borders]
        details[borders - 1 :: borders] = [None] * steps
        period = happened[:borders], details[:borders]
        if steps < 2 or happened[: steps * borders] != period[0] * steps:
            return 0
        phases = self._innermost_in(*period)
        if phases is None or details != period[1] * steps:
            return 0
        times_ns = log[1:length:_ENTRY_LENGTH]
        del log[:length]
        columns = FIRST_PHASE + len(self.phase_names)
        spent = spent_in_phases(times_ns, phases, self._end_ns, columns)
        flags, spent[SAMPLES], spent[TOKENS] = zip(*ends)
        self._count(flags, times_ns[borders - 1 :: borders], spent)
        return length

    def _innermost_in(self, happened: list[int], details: list[Any]) -> list[int] | None:
        """The phase before each entry of a step after which all is as before it, if it is one."""
        current, stack = self.current, self._stack[:]
        phases = []
        for what, detail in zip(happened, details):
            phases.append(current)
            current = _innermost(what, detail, current, stack)
        returns = (current, stack) == (self.current, self._stack)
        return phases if returns and what != START and self._spent == _BLANK else None

    def _settle_each(self, length: int, gpu: CudaSteps | None) -> int:
        """Entry for entry. Returns how much of the log they were."""
        log, stack = self.log, self._stack
        spent, current, mark_ns = self._spent, self.current, self._mark_ns
        rows: list[_Row] = []
        entries = iter(log[: min(length, _MAX_STEPS * _ENTRY_LENGTH)])
        done = 0
        try:
            for what, now, detail in zip(entries, entries, entries):
                done += _ENTRY_LENGTH
                spent[current] += now - mark_ns
                mark_ns = now
                if END <= what <= START:
                    self._cut(what, now, detail, spent, current, rows, gpu)
                    spent = _BLANK[:]
                elif gpu is not None:
                    gpu.border(current)
                current = _innermost(what, detail, current, stack)
        finally:
            self._spent, self.current, self._mark_ns = spent, current, mark_ns
            del log[:done]
        if rows:
            flags, wall_ns, numbers, spents = zip(*rows)
            columns = [*zip(*spents)][: FIRST_PHASE + len(self.phase_names)]
            self._write((flags, wall_ns, numbers, repeat(ABSENT), repeat(ABSENT), columns))
        return done

    def _cut(
        self,
        what: int,
        now: int,
        detail: Any,
        spent: list[int],
        current: int,
        rows: list[_Row],
        gpu: CudaSteps | None,
    ) -> None:
        """A step ends and counts, or what ran until now belongs to none."""
        before, self._end_ns = self._end_ns, now
        if what == START:
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
            rows.append((flags, wall_ns, number, spent))

    def _count(
        self, flags: Iterable[int], ended_ns: Sequence[int], spent: list[Sequence[int]]
    ) -> None:
        """Steps that have ended then, of which no GPU knows."""
        first, self._number = self._number, self._number + len(ended_ns)
        self._mark_ns = self._end_ns = ended_ns[-1]
        wall_ns = [*map(self.wall_offset_ns.__add__, ended_ns)]
        numbers = range(first, self._number)
        self._write((flags, wall_ns, numbers, repeat(ABSENT), repeat(ABSENT), spent))

    def finish(
        self, flags: int, wall_ns: int, number: int, gpu_ns: int, allocated: int, spent: list[int]
    ) -> None:
        """Count a step whose times are known, in order, and write it."""
        columns = [*zip(spent)][: FIRST_PHASE + len(self.phase_names)]
        self._write(((flags,), (wall_ns,), (number,), (gpu_ns,), (allocated,), columns))

    def _write(self, steps: Steps) -> None:
        totals, spent = self._totals, steps[-1]
        # All that is in use, column by column.
        self._totals = totals = [*map(add, totals, map(sum, spent)), *totals[len(spent) :]]
        ring = self.ring
        if ring is not None:
            if ring is not self._known_ring:
                self._meet(ring)
            ring.write_steps(steps, totals)

    def _meet(self, ring: RingWriter) -> None:
        self._known_ring = ring
        for index in range(len(self.phase_names)):
            self._define(ring, index)

    def _define(self, ring: RingWriter, index: int) -> None:
        payload = protocol.PHASE.pack(index) + self.phase_names[index].encode()
        ring.append(protocol.RECORD_PHASE, payload)


def _innermost(what: int, detail: Any, current: int, stack: list[int]) -> int:
    """The innermost phase after an entry of the log; ``stack`` holds those around it."""
    if what >= OTHER:
        stack.append(current)
        current = what
    elif what == END:
        return current
    elif what == START:
        stack.clear()
        return OTHER
    elif what != SWITCH:
        current = stack.pop() if stack else OTHER
        if what == LAST:
            detail = OTHER
    if detail is not None:
        if stack:
            stack[0] = detail
        else:
            current = detail
    return current
