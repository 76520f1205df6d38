"""The log of the training thread's borders, and what it adds up to: phases, steps, totals, records.

Phases are disjoint: at each border the time since the last one goes to the phase that was
innermost. Without a GPU the helper thread settles the log too, so that a step that ended just
before a hang is seen.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from operator import length_hint
from typing import Any

from warpwatch import faults, protocol
from warpwatch.borders import LEAVE, NEXT, OTHER, START, Entry
from warpwatch.cuda_steps import POOL_SIZE, CudaSteps, PooledEvent
from warpwatch.protocol import ABSENT, MAX_PHASES
from warpwatch.ring import (
    DURATION,
    FIRST_PHASE,
    NUMBER,
    SAMPLES,
    TOKENS,
    RingWriter,
    StepRow,
)

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
