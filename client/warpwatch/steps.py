"""The step clock, which the training thread runs at every step and phase boundary.

It never waits for a lock and opens no file. Between two kernels of the user the processor's caches
hold none of our code, so each line costs several times as much as in a benchmark. A boundary
therefore only appends its time to a log, which is settled for many short steps at once by
step_times.py.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from numbers import Real
from queue import SimpleQueue
from threading import get_ident, get_native_id
from time import monotonic_ns
from types import TracebackType
from typing import TYPE_CHECKING, Any

from warpwatch import faults, identity
from warpwatch.protocol import MAX_PHASES, WORD_STEP_BEGUN, WORD_STEP_BEGUN_AT
from warpwatch.ring import FIRST_PHASE, RingWriter, Work
from warpwatch.step_times import BEGIN, END, LEAVE, NEXT, OTHER, START, PhaseTimes, device_uuid

if TYPE_CHECKING:
    from warpwatch.captures import Captures

# A forked child must not destroy inherited CUDA events: that calls the driver, which may not be
# used after a fork.
_kept_in_child: list[Any] = []

# Shorter steps do not each check for a command. The daemon names a step at least 150 ms ahead.
POLL_INTERVAL_NS = 20_000_000
# Shorter steps are settled together; a killed process loses at most the steps of this time.
SETTLE_INTERVAL_NS = 50_000_000
# The training thread rests if it is in no phase and had no boundary for this long, while other
# threads called so often for a step of theirs.
REST_NS = 10_000_000_000
REST_CALLS = 16
# A larger count of samples or tokens is a mistake.
COUNT_BITS = 48


class StepClock(PhaseTimes):
    """Measures steps and phases of one thread, and is the context manager of a step.

    The helper thread reads ``calls``, the backwards and optimizer steps that the hooks have seen,
    ``trainer``, the thread, and ``steps_elsewhere``, the steps of other threads.
    """

    __slots__ = (
        "_dead", "_native_id", "_nested", "_poll_ns", "_rest_calls", "_rest_since_ns", "_settle_ns",
        "_started", "begun_ns", "calls", "captures", "capturing", "cuda", "device", "flags", "open",
        "samples", "steps", "steps_elsewhere", "tokens", "trainer", "wake_helper", "work",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        self.calls: Callable[[], int] = int
        self.trainer = threading.main_thread()
        self.captures: Captures | None = None
        self.cuda: Any = None  # torch.cuda, once the helper thread saw that it is in use
        self.device: str | None = None
        self.begun_ns = 0
        self.flags = 0
        self.capturing = False
        self.samples = 0
        self.tokens = 0
        self.work: Work | None = None  # of an iteration
        self.steps = self.steps_elsewhere = 0
        self._rest_calls = self._rest_since_ns = 0
        self.wake_helper: SimpleQueue[None] = SimpleQueue()
        self.open = self._dead = self._started = False
        self._nested = self._native_id = 0
        self._poll_ns = self._settle_ns = 0

    # --- the hot path ---------------------------------------------------------------------------

    def begin(self) -> StepClock:
        """Start a step. Inside another step, and in another thread, it does not count."""
        try:
            if get_ident() != self.thread and not self.adopt():
                self.steps_elsewhere += 1
                return self
            if self.open:
                self._nested += 1
                return self
            self.begun_ns = now = monotonic_ns()
            if now >= self._poll_ns:
                self._poll(now)
            if self.gpu is not None:
                self.gpu.follow_stream()
                self.push((BEGIN, now, None))
            # Last, so that an interrupt leaves no step to end.
            self.open = True
        except Exception as error:
            faults.swallow(error)
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the step. A step that raises is not counted."""
        try:
            if get_ident() != self.thread:
                return
            if self._nested or error is not None or not self.open:
                self._leave(error)
                return
            self.open = False
            now = monotonic_ns()
            self.steps += 1
            self.push((END, now, (self.flags, self.samples, self.tokens, self.work)))
            if now >= self._settle_ns:
                self._ended(now)
        except Exception as fault:
            faults.swallow(fault)

    __enter__ = begin

    def next_step(self, now: int) -> None:
        """End the open step ``now`` and start the next one. In the training thread."""
        self.steps += 1
        self.push((NEXT, now, (self.flags, self.samples, self.tokens, self.work)))
        if self.gpu is not None:
            self.gpu.follow_stream()
        self.samples = self.tokens = 0
        self.begun_ns = now
        if now >= self._poll_ns:
            if now >= self._settle_ns:
                self._ended(now)
            self._poll(now)

    # --- what happens seldom --------------------------------------------------------------------

    @property
    def begun(self) -> int:
        """The number of the started step, plus 1; 0 before the first."""
        return self.steps + self.open

    def end(self) -> None:
        """End the step without a ``with`` block."""
        self.__exit__(None, None, None)

    def replace_innermost(self, index: int) -> None:
        """Replace the innermost phase, also in a thread that the training thread waits for."""
        now = monotonic_ns()
        self.push((LEAVE, now, None))
        self.push((index, now, None))

    def restart(self) -> None:
        """Discard the time since the last step and start a step."""
        if get_ident() == self.thread:
            self.open = False
            self._nested = 0
            self.samples = self.tokens = 0
            self._started = False
            self._poll_ns = 0
            self.begin()

    def interrupt(self, reason: str) -> None:
        """End a recording without a trace, because a phase starts that is not normal work."""
        if self.capturing and self.captures is not None:
            self.captures.interrupt(reason)

    def count(self, samples: int = 0, tokens: int = 0) -> None:
        """Add samples and tokens that are known only after the step's start."""
        if get_ident() == self.thread:
            self.samples += bounded_count(samples)
            self.tokens += bounded_count(tokens)

    def phase_index(self, name: str) -> int:
        """Return the index of the phase's time; OTHER if there are MAX_PHASES already."""
        name = identity.phase_name(str(name))
        if name in self.phase_names:
            return FIRST_PHASE + self.phase_names.index(name)
        number = len(self.phase_names)
        foreign = self.thread not in (0, get_ident())
        if number >= MAX_PHASES or self._dead or foreign:
            return OTHER
        self.phase_names.append(name)
        if self._known_ring is not None:
            self._define(self._known_ring, number)
        return FIRST_PHASE + number

    def drop(self) -> None:
        """Stop measuring in a forked child."""
        self._dead = True
        self.thread = 0
        _kept_in_child.append((self.gpu, self.captures))
        self.ring = self._known_ring = self.gpu = self.captures = None
        self.push = self.log.extend

    def adopt(self) -> bool:
        """Make the calling thread the training thread, unless another one lives and trains."""
        if self._dead or (self.is_elsewhere() and not self._rests()):
            return False
        self.thread = get_ident()
        self.open = self._started = False
        self._nested = self._poll_ns = 0
        return True

    def is_elsewhere(self) -> bool:
        """Return whether the training thread is another one that lives."""
        return self.thread != get_ident() and self.thread in sys._current_frames()

    def _rests(self) -> bool:
        """Return whether the training thread has trained nothing since other threads do."""
        since_ns = self.log[-2] if self.log else self._mark_ns
        if since_ns != self._rest_since_ns:
            self._rest_since_ns, self._rest_calls = since_ns, 0
        self._rest_calls += 1
        if self._rest_calls < REST_CALLS or monotonic_ns() - since_ns < REST_NS:
            return False
        self.settle(helping=True)
        # On a GPU only the training thread settles the log.
        kinds = self.log[::3]
        entered = sum(kind >= OTHER for kind in kinds) - kinds.count(LEAVE)
        return self.current == OTHER and len(self._stack) + entered <= 0

    def _ended(self, now: int) -> None:
        """Settle the log and advance a capture; skipped after most short steps."""
        self.settle()
        if self.capturing and self.captures is not None:
            self.captures.step_ended(self, self.steps - 1)
        self._settle_ns = now + SETTLE_INTERVAL_NS

    def _poll(self, now: int) -> None:
        """Report the started step and check for a command; skipped at most short steps."""
        self._poll_ns = now + POLL_INTERVAL_NS
        # Python gives a thread the number of one that has ended, the kernel does not so soon.
        if get_native_id() != self._native_id:
            self._native_id, self.trainer = get_native_id(), threading.current_thread()
        if not self._started:
            self._started = True
            self.push((START, now, None))
            self.wake_helper.put(None)
        if self.cuda is not None and self.gpu is None:
            self._find_gpu()
        ring = self.ring
        if ring is not None:
            ring.words[WORD_STEP_BEGUN_AT] = now
            ring.words[WORD_STEP_BEGUN] = self.steps + 1
            if self.captures is not None:
                try:
                    self.captures.follow(self, ring, self.steps)
                except Exception as error:
                    # The program may have closed a descriptor that was ours.
                    faults.swallow(error)
        if self.capturing:
            self._poll_ns = self._settle_ns = 0

    @faults.guarded
    def _find_gpu(self) -> None:
        if self.use_gpu(self.cuda):
            self.device = device_uuid(self.cuda, os.environ.get("CUDA_VISIBLE_DEVICES"))

    def report_begun(self, ring: RingWriter) -> None:
        """Report the started step from the helper thread, until it is the newest one."""
        reported = 0
        while reported != self.begun:
            reported = self.begun
            ring.words[WORD_STEP_BEGUN_AT] = self.begun_ns
            ring.words[WORD_STEP_BEGUN] = reported

    def _leave(self, error: BaseException | None) -> None:
        """Leave a nested or failed step: it does not count, its time goes to the next one."""
        if self._nested:
            self._nested -= 1
        elif self.open:
            self.open = False
            if self.ring is not None and error is not None and is_out_of_memory(error):
                self.settle()
                self.ring.event("oom", detail=str(error)[:100])


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"


def bounded_count(value: Any) -> int:
    """Return a count that the ring can hold; 0 for a tensor, since reading it may wait."""
    if not isinstance(value, Real):
        return 0
    try:
        return min(max(int(float(value)), 0), (1 << COUNT_BITS) - 1)
    except (ValueError, OverflowError):
        return 0
