"""What the hooks of a process know together: who sets the step clock, and what runs between calls.

There is no monitor before a backward or an optimizer step asks for one: a process that only loads
data or evaluates is no rank. Hooks call from the training thread; other threads count for nothing.

Between two operators of torch the processor's caches hold nothing of ours: each line that runs at
every step costs several times what it costs alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any

from warpwatch import faults
from warpwatch.attach import attach
from warpwatch.monitor import Monitor
from warpwatch.step_times import OTHER


class HookState:
    """One a process, shared by all hooks. ``off``: in the forked child of a rank, for ever.

    ``backwards``, ``updates`` and ``batches`` count calls of backward, steps of any optimizer and
    batches of training data; ``elsewhere``, backwards and updates in other threads than the
    training's.
    ``samples`` and ``tokens`` are in batches that no backward has used. loaded_by: the thread that
    loaded a batch before the process was a rank, 0 if none did.
    compiles: torch.compile is in use; ``is_compiling`` need not be asked before.
    after_backward: the phase that runs from the end of backward on.
    """

    __slots__ = (
        "__weakref__",
        "_awaited",
        "_backward",
        "_compiling",
        "_forward",
        "_when_compiling",
        "after_backward",
        "backwards",
        "batches",
        "compiles",
        "due",
        "elsewhere",
        "evaluating",
        "graph_task",
        "in_backward",
        "is_compiling",
        "is_grad_enabled",
        "loaded_by",
        "monitor",
        "next_awaited",
        "off",
        "samples",
        "tokens",
        "updates",
    )  # fmt: skip

    def __init__(self) -> None:
        self.monitor: Monitor | None = None
        self.off = False
        self.compiles = False
        self._when_compiling: list[Callable[[], None]] = []
        self._compiling: Callable[[], bool] = _never
        self.is_compiling: Callable[[], bool] = _never
        self.is_grad_enabled: Callable[[], bool] = _always
        self.graph_task: Callable[[], int] = _unknown
        self.backwards = self.updates = self.batches = self.elsewhere = 0
        self.samples = self.tokens = self.loaded_by = 0
        # None: no one says so, as a framework does. It is to be guessed.
        self.evaluating: bool | None = None
        self.in_backward = False
        self.after_backward = OTHER
        self._backward = self._forward = 0  # the phases, once they are known
        # Who has ended a step inside of backward; it ends with it.
        self.due: str | None = None
        self._awaited: dict[int, Callable[[], None]] = {}
        self.next_awaited = 0

    # --- the process ------------------------------------------------------------------------------

    def torch_imported(self, torch: ModuleType) -> None:
        """What the hooks ask of torch itself, once the program has imported it."""
        self._compiling = is_compiling_of(torch)
        if self.compiles:
            self.compile()
        self.is_grad_enabled = torch.is_grad_enabled
        self.graph_task = getattr(torch._C, "_current_graph_task_id", _unknown)

    def dynamo_imported(self, eval_frame: ModuleType) -> None:
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
                self.monitor.clock.calls = self.calls
        return self.monitor

    def calls(self) -> int:
        """Whoever ends the steps: that they rise says that the process trains."""
        return self.backwards + self.updates + self.elsewhere

    def drop(self) -> None:
        """In a forked child. The parent of a rank that is yet to come was none itself."""
        if self.monitor is not None:
            self.off = True
            self.monitor = None

    def in_training_thread(self) -> bool:
        """Whether this is the training thread. There is none before the first step began."""
        monitor = self.monitor
        return monitor is not None and get_ident() == monitor.clock.thread

    def in_autograd_thread(self) -> bool:
        """Whether this thread runs the backward that the training thread waits for, as on a GPU."""
        return self.in_backward and self.graph_task() >= 0

    # --- steps ------------------------------------------------------------------------------------

    def leads(self, source: str) -> bool:
        """Whether ``source`` sets the step clock: nothing stronger has claimed it."""
        monitor = self.monitor
        return monitor is not None and (monitor.step_clock == source or monitor.lead(source))

    def begin_training(self, source: str) -> None:
        """A framework's training begins: it reports steps and evaluations from here on."""
        if self.attach() is not None and self.leads(source):
            self.evaluating = False
            self.samples = self.tokens = 0
            if self.monitor is not None:
                # What ran since an earlier training is no part of this one.
                self.monitor.clock.restart()
            self.begin_step(source)

    def end_training(self, source: str) -> None:
        """It has ended; whatever trains next may set the step clock."""
        if self.monitor is not None and self.monitor.step_clock == source:
            self.evaluating = None
            self.monitor.release(source)

    def set_tokens(self, source: str, tokens: int) -> None:
        """What ``source`` counted for the running step, instead of what the data look like."""
        if self.monitor is not None and self.leads(source):
            self.count_batches(self.monitor)
            self.monitor.clock.tokens = tokens

    def begin_step(self, source: str) -> None:
        """Training begins here, where ``source`` leads and no step of a living thread runs."""
        if self.leads(source) and self.monitor is not None:
            clock = self.monitor.clock
            if not clock.open or (get_ident() != clock.thread and clock.adopt()):
                clock.begin()

    def end_step(self, source: str, now: int | None = None) -> None:
        """A step ends where ``source`` leads, and the next one begins.

        One that an optimizer ends inside of backward ends with it. ``now``: the time of it, from a
        caller in the training thread.
        """
        if self.in_backward:
            self.due = source
            return
        monitor = self.monitor
        if monitor is None or not (monitor.step_clock == source or monitor.lead(source)):
            return
        clock = monitor.clock
        if now is None:
            if get_ident() != clock.thread:
                clock.steps_elsewhere += 1
                return
            now = monotonic_ns()
        if not self.backwards:
            self.count_batches(monitor)
        if clock.open:
            clock.next_step(now)
        else:
            clock.begin()

    def count_batches(self, monitor: Monitor) -> None:
        """The batches of data that are used now belong to the running step."""
        if monitor.step_clock != "step()":
            clock = monitor.clock
            clock.samples += self.samples
            clock.tokens += self.tokens
        self.samples = self.tokens = 0

    # --- phases -----------------------------------------------------------------------------------

    def pair_phases(self, backward: int = 0, forward: int = 0) -> None:
        """``forward`` is the phase between data and ``backward``, once both are known."""
        self._backward, self._forward = backward or self._backward, forward or self._forward
        if self._forward and self._backward and self.monitor is not None:
            self.monitor.clock.used_by = (self._backward, self._forward)

    def switch(self, phase: str) -> None:
        """What runs between the phases is ``phase`` from now on: ``forward``, ``eval``, ``other``.

        Until the next call or the end of the step.
        """
        if self.monitor is not None:
            self.monitor.switch(phase)

    # --- backwards --------------------------------------------------------------------------------

    def when_backward(self, number: int, act: Callable[[], None]) -> None:
        """Call ``act`` as the backward of this number begins, or the next one that has no other."""
        while number in self._awaited:
            number += 1
        self._awaited[number] = faults.guarded(act)
        self.next_awaited = min(self._awaited)

    def act_at_backward(self) -> None:
        """The backward that was awaited begins."""
        self._awaited.pop(self.backwards)()
        self.next_awaited = min(self._awaited, default=0)


def _loads_data() -> bool:
    """Whether this process is a DataLoader's worker: it trains nothing, whatever it computes."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return getattr(worker, "_worker_info", None) is not None


def _unknown() -> int:
    return 0


def _always() -> bool:
    return True


def is_compiling_of(torch: Any) -> Callable[[], bool]:
    """The function of this torch that dynamo takes for true. The newer one is the cheaper one."""
    compiler, utils = getattr(torch, "compiler", None), getattr(torch, "_utils", None)
    found = getattr(compiler, "is_dynamo_compiling", None)
    found = found or getattr(compiler, "is_compiling", None)
    found = found or getattr(utils, "is_compiling", None)
    return found if found is not None else _never


def has_compiled(eval_frame: Any) -> bool:
    """Whether the program used torch.compile before; also where that is not known."""
    patch = getattr(getattr(eval_frame, "TorchPatcher", None), "patch", None)
    cache_info = getattr(patch, "cache_info", None)
    return cache_info is None or cache_info().currsize > 0


def _never() -> bool:
    return False
