"""The shared state of a process's hooks: the source of the step clock, the phase between calls.

The first backward or optimizer step creates the monitor: a process that only loads data or
evaluates does not become a rank. Hooks call from the training thread; other threads are ignored.

Between two operators of torch the processor's caches hold none of our code: each line that runs at
every step costs several times what it costs alone.

A wrapper starts with ``if state.is_compiling(): return original(...)``, which dynamo folds to the
original call, so that it vanishes from graphs. Wrappers that run at every step first check
``state.compiles``, which needs no call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any
from weakref import ref

from warpwatch import faults
from warpwatch.attach import attach
from warpwatch.monitor import Monitor
from warpwatch.step_times import OTHER
from warpwatch.steps import StepClock


class HookState:
    """The state of the process, shared by all hooks; ``off`` for ever in the fork of a rank.

    ``backwards``, ``updates`` and ``batches`` count calls of backward, steps of any optimizer and
    batches of training data; ``elsewhere`` counts backwards and updates in other threads.
    ``samples`` and ``tokens`` are in batches that no backward has used. ``loaded_by`` is the thread
    that loaded a batch before the process was a rank, or 0. While ``compiles`` is False,
    ``is_compiling`` is too. ``after_backward`` is the phase from the end of backward on.
    """

    __slots__ = (
        "__weakref__", "_awaited", "_backward", "_compiling", "_forward", "_when_compiling",
        "after_backward", "backwards", "batches", "compiles", "due", "elsewhere", "evaluating",
        "graph_task", "in_backward", "is_compiling", "is_grad_enabled", "loaded_by", "monitor",
        "next_awaited", "off", "samples", "tokens", "updates",
    )  # fmt: skip

    def __init__(self) -> None:
        self.monitor: Monitor | None = None
        self.off = False
        self.compiles = False
        self._when_compiling: list[Callable[[], None]] = []
        self._compiling: Callable[[], bool] = bool
        self.is_compiling: Callable[[], bool] = bool
        self.is_grad_enabled: Callable[[], bool] = _always
        self.graph_task: Callable[[], int] = int
        self.backwards = self.updates = self.batches = self.elsewhere = 0
        self.samples = self.tokens = self.loaded_by = 0
        # A framework reports it; None means that it has to be guessed.
        self.evaluating: bool | None = None
        self.in_backward = False
        self.after_backward = OTHER
        self._backward = self._forward = 0  # the phases, once they are known
        # The source that has ended a step inside backward: the step ends with backward.
        self.due: str | None = None
        self._awaited: dict[int, Callable[[], None]] = {}
        self.next_awaited = 0

    # --- the process ------------------------------------------------------------------------------

    def torch_imported(self, torch: ModuleType) -> None:
        """Take the functions that the hooks need from the imported torch."""
        self._compiling = is_compiling_of(torch)
        if self.compiles:
            self.compile()
        self.is_grad_enabled = torch.is_grad_enabled
        self.graph_task = getattr(torch._C, "_current_graph_task_id", int)

    def dynamo_imported(self, eval_frame: ModuleType) -> None:
        """Watch for torch.compile: the first one calls TorchPatcher.patch before it compiles."""
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
        """Return the monitor, since the process trains. None in a forked child or a worker."""
        if self.monitor is None and not self.off:
            if _loads_data():
                self.off = True
            else:
                self.monitor = attach()
                self.monitor.clock.calls = self.calls
        return self.monitor

    def calls(self) -> int:
        """Return the backwards and updates so far: their rise shows that the process trains."""
        return self.backwards + self.updates + self.elsewhere

    def drop(self) -> None:
        """Drop the monitor in a forked child of a rank; another child may become a rank."""
        if self.monitor is not None:
            self.off = True
            self.monitor = None

    def in_training_thread(self) -> bool:
        monitor = self.monitor
        return monitor is not None and get_ident() == monitor.clock.thread

    def in_autograd_thread(self) -> bool:
        """Return whether this thread runs the training thread's backward, as on a GPU."""
        return self.in_backward and self.graph_task() >= 0

    # --- steps ------------------------------------------------------------------------------------

    def leads(self, source: str) -> bool:
        """Return whether ``source`` sets the step clock, since nothing stronger does."""
        return self.monitor is not None and self.monitor.lead(source)

    def begin_training(self, source: str) -> None:
        """Start a framework's training, which reports steps and evaluations from here on."""
        if self.attach() is not None and self.leads(source):
            self.evaluating = False
            self.samples = self.tokens = 0
            if self.monitor is not None:
                # The time since an earlier training does not belong to this one.
                self.monitor.clock.restart()
            self.begin_step(source)

    def end_training(self, source: str) -> None:
        """End a framework's training; the next training may set the step clock."""
        if self.monitor is not None and self.monitor.step_clock == source:
            self.evaluating = None
            self.monitor.release(source)

    def set_tokens(self, source: str, tokens: int) -> None:
        """Set the running step's tokens to the count of ``source`` instead of the data's."""
        if self.monitor is not None and self.leads(source):
            self.count_batches(self.monitor)
            self.monitor.clock.tokens = tokens

    def begin_step(self, source: str) -> None:
        """Start a step if ``source`` leads and no step of a living thread runs."""
        if self.leads(source) and self.monitor is not None:
            clock = self.monitor.clock
            if not clock.open or (get_ident() != clock.thread and clock.adopt()):
                clock.begin()

    def end_step(self, source: str, now: int | None = None) -> None:
        """End a step and start the next one, if ``source`` leads.

        A step that ends inside backward ends with it. A caller in the training thread may pass
        the time as ``now``.
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
        """Add the batches that are used now to the running step."""
        if monitor.step_clock != "step()":
            clock = monitor.clock
            clock.samples += self.samples
            clock.tokens += self.tokens
        self.samples = self.tokens = 0

    # --- phases -----------------------------------------------------------------------------------

    def pair_phases(self, backward: int = 0, forward: int = 0) -> None:
        """Make ``forward`` the phase between data and ``backward``, once both are known."""
        self._backward, self._forward = backward or self._backward, forward or self._forward
        if self._forward and self._backward and self.monitor is not None:
            self.monitor.clock.used_by = (self._backward, self._forward)

    def switch(self, phase: str) -> None:
        """Attribute the time between phases to ``phase`` until the next call or the step's end."""
        if self.monitor is not None:
            self.monitor.switch(phase)

    # --- backwards --------------------------------------------------------------------------------

    def when_backward(self, number: int, act: Callable[[], None]) -> None:
        """Call ``act`` at the start of the backward of this number, or the next free one."""
        while number in self._awaited:
            number += 1
        self._awaited[number] = faults.guarded(act)
        self.next_awaited = min(self._awaited)

    def act_at_backward(self) -> None:
        """Call the function for the backward that starts now."""
        self._awaited.pop(self.backwards)()
        self.next_awaited = min(self._awaited, default=0)


def _loads_data() -> bool:
    """Return whether this process is a DataLoader's worker, which never trains."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return getattr(worker, "_worker_info", None) is not None


def _always() -> bool:
    return True


def is_compiling_of(torch: Any) -> Callable[[], bool]:
    """Return torch's function that dynamo folds to True; the newer one is cheaper."""
    compiler, utils = getattr(torch, "compiler", None), getattr(torch, "_utils", None)
    found = getattr(compiler, "is_dynamo_compiling", None)
    found = found or getattr(compiler, "is_compiling", None)
    return found or getattr(utils, "is_compiling", None) or bool


def has_compiled(eval_frame: Any) -> bool:
    """Return whether the program has used torch.compile, or may have."""
    patch = getattr(getattr(eval_frame, "TorchPatcher", None), "patch", None)
    cache_info = getattr(patch, "cache_info", None)
    return cache_info is None or cache_info().currsize > 0


# This many steps in a row are a turn of its own: within a training step each steps once.
TURN_STEPS = 2
# Steps of another optimizer without a step of the clock's, until the number per training step is
# known. A GAN's critic takes five for one of the generator (Gulrajani et al. 2017).
TAKE_OVER_AFTER = 16
# After this time without a step of the clock's fewer steps suffice.
TAKE_OVER_NS = 10_000_000_000
# Removed optimizers are dropped once per this many new ones.
CLEAN_UP_AFTER = 64


class _SteppedOptimizer:
    """An optimizer that has stepped.

    ``count`` is its steps in ``round`` without one of the clock's; ``has_turns`` tells whether it
    has had turns of its own.
    """

    __slots__ = ("count", "has_turns", "optimizer", "round")

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = ref(optimizer)
        self.count = self.round = 0
        self.has_turns = False


class ClockChoice:
    """The choice of the optimizer that ends steps, asked when another than it has stepped.

    Optimizers that step in turn at every step (the two of a GAN) share a step, which the first
    ends. An optimizer that steps alone is the clock from its first step on if it is new or has had
    turns of its own. Otherwise it becomes the clock once the other has not stepped for longer than
    ever before.

    A round lasts until the clock's optimizer steps. ``_run`` is the most steps of another optimizer
    in this round, ``_most`` in any earlier one. ``_steps`` is the clock's steps when another one
    last stepped, ``_new_at`` when a new one came. If each training step has a new one
    (meta-learning), newness is ignored. With ``gives_back`` the previous clock led for a single
    step, which was part of the one that goes on (a critic's generator).
    """

    __slots__ = ("_most", "_new_at", "_round", "_run", "_seen", "_steps", "gives_back")

    def __init__(self) -> None:
        self._seen: dict[int, _SteppedOptimizer] = {}
        self._most = self._new_at = self._round = self._run = self._steps = 0
        self.gives_back = False

    def takes_over(self, optimizer: Any, current: Any, clock: StepClock) -> bool:
        """Return whether ``optimizer``, which has stepped, is the clock from this step on.

        With ``gives_back`` this step ends nothing: the previous clock's step counted instead.
        ``current`` is the clock's optimizer, None if it was deleted.
        """
        steps, alone = clock.steps, clock.steps - self._steps
        if alone:
            self._steps = steps
            self._round += 1
            if self._run > self._most:
                self._most = self._run
            self._run = 0
        if alone >= TURN_STEPS and current is not None:
            self._of(current).has_turns = True
        seen = self._seen.get(id(optimizer))
        if seen is None or seen.optimizer() is not optimizer:
            seen = self._of(optimizer)
            is_turn, self._new_at = steps - self._new_at >= TURN_STEPS, steps
            gives_back = False
        else:
            is_turn = seen.has_turns and self._is_turn(current, alone)
            gives_back = is_turn and alone == 1 and current is not None
        seen.count = seen.count + 1 if seen.round == self._round else 1
        seen.round = self._round
        if seen.count > self._run:
            self._run = seen.count
        is_left = seen.count >= 2 * self._most + 2 and self._is_left(seen.count, clock)
        if current is not None and not is_turn and not is_left:
            return False
        self._most = self._run = seen.count = 0
        self.gives_back = gives_back
        return True

    def _of(self, optimizer: Any) -> _SteppedOptimizer:
        seen = self._seen.get(id(optimizer))
        if seen is None or seen.optimizer() is not optimizer:
            if len(self._seen) % CLEAN_UP_AFTER == 0:
                lives = {key: one for key, one in self._seen.items() if one.optimizer() is not None}
                self._seen = lives
            seen = self._seen[id(optimizer)] = _SteppedOptimizer(optimizer)
        return seen

    def _is_turn(self, current: Any, alone: int) -> bool:
        """Return whether this is a turn: an optimizer with a single step gives the clock back."""
        return alone >= TURN_STEPS or current is None or not self._of(current).has_turns

    def _is_left(self, count: int, clock: StepClock) -> bool:
        """Return whether the clock's has not stepped for many steps or a long time."""
        return count >= TAKE_OVER_AFTER or monotonic_ns() - clock.begun_ns >= TAKE_OVER_NS
