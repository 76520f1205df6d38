"""What the hooks of a process know together: who sets the step clock, and what runs between calls.

There is no monitor before a backward or an optimizer step asks for one: a process that only loads
data or evaluates is no rank. Hooks call from the training thread; other threads count for nothing.

Between two operators of torch the processor's caches hold nothing of ours: each line costs several
times what it costs alone, and a call as much as ten lines. So hooks know three ways. Steps that are
all alike are laps (lap.py), which call none of this. Other steps of a known order call the clock
and few methods; each hook asks for what that takes for granted. All else is left to the methods
here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from types import ModuleType
from typing import Any

from warpwatch import faults
from warpwatch.attach import attach
from warpwatch.hooks.compiling import has_compiled, is_compiling_of
from warpwatch.hooks.lap import IN_BACKWARD, NONE, Lap
from warpwatch.monitor import Monitor, Phase
from warpwatch.phase_times import LEAVE, OTHER
from warpwatch.steps import StepClock

# Who may begin a step at the first backward: nobody yet, or those who see no more than that.
_AUTOMATIC = ("", "optimizer", "dataloader")


class Flow:
    """One a process, shared by all hooks. ``off``: in the forked child of a rank, for ever.

    ``backwards``, ``updates`` and ``batches`` count calls of backward, steps of any optimizer and
    batches of training data; ``samples`` and ``tokens`` are in batches that no backward has used.
    ``clock``: of the monitor, unless ``off``. ``turned``: the same from an optimizer's step that
    ended one of the clock's up to the next batch. ``compiles``: torch.compile is in use, before
    which ``is_compiling`` need not be asked.
    """

    def __init__(self) -> None:
        self.monitor: Monitor | None = None
        self.clock: StepClock | None = None
        self.turned: StepClock | None = None
        self.off = False
        self.compiles = False
        self.lap = Lap(self)
        self._when_compiling: list[Callable[[], None]] = []
        self._compiling: Callable[[], bool] = _never
        self.is_compiling: Callable[[], bool] = _never
        self.is_grad_enabled: Callable[[], bool] = _always
        self.tensor: Any = None
        # Of a tensor, by nothing but C; ``len`` takes five times as long.
        self.tensor_length: Callable[[Any], int] = len
        self.graph_task: Callable[[], int] = _unknown
        self.backwards = self.updates = self.batches = 0
        self.samples = self.tokens = 0
        # None: nobody tells, as a framework does. It is to be guessed.
        self.evaluating: bool | None = None
        self._in_backward = False
        self.backward_phase = OTHER
        self._backward: Phase | None = None
        self.due: str | None = None

    # --- the process ------------------------------------------------------------------------------

    def meet(self, torch: ModuleType) -> None:
        """What the hooks ask of torch itself, once the program has imported it."""
        self._compiling = is_compiling_of(torch)
        if self.compiles:
            self.compile()
        self.is_grad_enabled = torch.is_grad_enabled
        self.tensor = torch.Tensor
        self.tensor_length = torch.Tensor.__base__.__len__
        self.graph_task = getattr(torch._C, "_current_graph_task_id", _unknown)

    def meet_dynamo(self, eval_frame: ModuleType) -> None:
        """Nothing is compiled before the first torch.compile calls TorchPatcher.patch."""
        if has_compiled(eval_frame):
            self.compile()
            return
        patcher = eval_frame.TorchPatcher
        original = patcher.patch

        @wraps(original)
        def patch() -> None:
            self.compile()
            original()

        patcher.patch = staticmethod(patch)

    def compile(self) -> None:
        self.compiles = True
        self.lap.forbid()
        self.is_compiling = self._compiling
        waiting, self._when_compiling = self._when_compiling, []
        for act in waiting:
            act()

    def when_compiling(self, act: Callable[[], None]) -> None:
        """Call ``act`` once torch.compile is in use."""
        act = faults.guarded(act)
        if self.compiles:
            act()
        else:
            self._when_compiling.append(act)

    def attach(self) -> Monitor | None:
        """The monitor from now on: the process trains. None in a forked child or a worker."""
        if self.monitor is None and not self.off:
            if _loads_data():
                self.off = True
            else:
                self.monitor = attach()
                self.clock = self.monitor.clock
        return self.monitor

    def drop(self) -> None:
        """In a forked child. The parent of a rank that is yet to come was none itself."""
        if self.monitor is not None:
            self.off = True
            self.lap.stage = NONE
            self.monitor = self.clock = self.turned = None

    def here(self) -> bool:
        """Whether this is the training thread. There is none before the first step began."""
        monitor = self.monitor
        return monitor is not None and get_ident() == monitor.clock.thread

    # --- steps ------------------------------------------------------------------------------------

    def leads(self, source: str) -> bool:
        """Whether ``source`` sets the step clock: nothing stronger has claimed it."""
        monitor = self.monitor
        return monitor is not None and (monitor.step_clock == source or monitor.lead(source))

    def begin_training(self, source: str) -> None:
        """A framework's training begins: it tells steps and evaluations from here on."""
        self.lap.leave()
        if self.attach() is not None and self.leads(source):
            self.evaluating = False
            self.samples = self.tokens = 0
            if self.clock is not None:
                # What ran since an earlier training is no part of this one.
                self.clock.restart()
            self.begin_step(source)

    def end_training(self, source: str) -> None:
        """It has ended; whatever trains next may set the step clock."""
        self.lap.leave()
        if self.monitor is not None and self.monitor.step_clock == source:
            self.evaluating = None
            self.monitor.release(source)

    def set_tokens(self, source: str, tokens: int) -> None:
        """What ``source`` counted for the running step, instead of what the data look like."""
        self.lap.leave()
        if self.monitor is not None and self.leads(source):
            self.count_batches()
            self.monitor.clock.tokens = tokens

    def begin_step(self, source: str) -> None:
        """Training begins here, where ``source`` leads and no step runs."""
        if self.leads(source) and self.monitor is not None and not self.monitor.clock.open:
            self.monitor.clock.begin()

    def end_step(self, source: str) -> None:
        """A step ends where ``source`` leads, and the next one begins.

        One that an optimizer ends inside of backward ends with it.
        """
        if self.in_backward:
            self.lap.drop()
            self.due = source
            return
        self.lap.leave()
        if self.leads(source) and self.monitor is not None:
            clock = self.monitor.clock
            if not self.backwards:
                self.count_batches()
            clock.switch(OTHER)
            clock.end()
            if get_ident() == clock.thread:
                clock.samples = clock.tokens = 0
            clock.begin()

    def count_batches(self) -> None:
        """The batches of data that are used now belong to the running step."""
        monitor = self.monitor
        try:
            if monitor is not None:
                if monitor.step_clock != "step()":
                    monitor.clock.samples += self.samples
                    monitor.clock.tokens += self.tokens
                self.samples = self.tokens = 0
        except Exception as error:
            faults.swallow(error)

    # --- phases -----------------------------------------------------------------------------------

    def switch(self, phase: str) -> None:
        """What runs between the phases is ``phase`` from now on: ``forward``, ``eval``, ``other``.

        Until the next call or the end of the step.
        """
        if self.monitor is not None:
            self.monitor.switch(phase)

    @property
    def in_backward(self) -> bool:
        return self._in_backward or self.lap.stage == IN_BACKWARD

    def enter_backward(self, clock: StepClock, now: int) -> None:
        """Backward is called in a step of a known order."""
        self.backwards += 1
        if self.samples or self.tokens:
            self.count_batches()
        self._in_backward = True
        clock.push((self.backward_phase, now, OTHER))

    def leave_backward(self, clock: StepClock, now: int) -> None:
        self._in_backward = False
        clock.push((LEAVE, now, None))
        if self.due is not None:
            self.end_due()

    def begin_backward(self) -> bool:
        """Whether ``end_backward`` has to follow: in the training thread, and not for one inside
        another. The first backward of a process makes it a rank and begins its first step.
        """
        try:
            monitor = self.monitor
            if monitor is None:
                monitor = self.attach()
                if monitor is None:
                    return False
            clock = monitor.clock
            if not clock.open and monitor.step_clock in _AUTOMATIC:
                clock.begin()
            if get_ident() != clock.thread or (self.in_backward and self.graph_task() >= 0):
                return False
            self.backwards += 1
            self.count_batches()
            self._backward = monitor.phase("backward").__enter__()
            self.backward_phase = self._backward.index
            clock.switch(OTHER)
            self._in_backward = True
            return True
        except Exception as error:
            faults.swallow(error)
            return False

    def end_backward(self) -> None:
        try:
            self._in_backward = False
            if self._backward is not None:
                self._backward.__exit__(None, None, None)
            self.end_due()
        except Exception as error:
            faults.swallow(error)

    @faults.guarded
    def end_due(self) -> None:
        """The step that ended inside of backward."""
        due, self.due = self.due, None
        if due is not None:
            self.end_step(due)


def _loads_data() -> bool:
    """Whether this process is a DataLoader's worker: it trains nothing, whatever it computes."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return getattr(worker, "_worker_info", None) is not None


def _never() -> bool:
    return False


def _unknown() -> int:
    return 0


def _always() -> bool:
    return True
