"""The call of backward is the phase ``backward``; the first one makes the process a rank.

``Tensor.backward`` calls ``torch.autograd.backward`` by its name, so that is the one to wrap. Where
nothing else can end a step, each backward does: the last resort.
"""

from __future__ import annotations

import sys
import weakref
from functools import wraps
from threading import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any

from warpwatch import faults
from warpwatch.borders import LEAVE
from warpwatch.hooks.hook_state import HookState
from warpwatch.monitor import Monitor

SOURCE = "backward"
MODULE = "torch"
# Of RPC: gradients pass from process to process.
DISTRIBUTED_MODULE = "torch.distributed.autograd"
# Who may begin a step at the first backward: no one yet, or those who see no more than that.
_AUTOMATIC = ("", "optimizer", "dataloader", SOURCE)
# Backwards without a batch of data or a step of an optimizer, after which each is a step; so many
# times as many where there is an optimizer, which may accumulate gradients.
LEAD_AFTER = 64
WITH_AN_OPTIMIZER = 10


class BackwardHook:
    """What surrounds ``backward``. ``_ends``: whose step each ends, if any; ``_progress``: updates
    and batches at the last look whether anything else ends steps.
    """

    __slots__ = ("_ends", "_phase", "_progress", "_state")

    def __init__(self, state: HookState) -> None:
        self._state = state
        self._phase = 0
        self._progress = 0
        self._ends: str | None = None
        state.when_backward(LEAD_AFTER, self._look)

    def begin(self) -> bool:
        """Whether ``end`` has to follow: in the training thread, and not for one inside another.

        The first backward of a process makes it a rank and begins its first step.
        """
        state = self._state
        try:
            monitor = state.monitor or state.attach()
            if monitor is None:
                return False
            clock = monitor.clock
            if get_ident() != clock.thread and not (
                monitor.step_clock in _AUTOMATIC and clock.adopt()
            ):
                state.elsewhere += 1
                return False
            if not clock.open and monitor.step_clock in _AUTOMATIC:
                clock.begin()
            if state.in_backward and state.graph_task() >= 0:
                return False
            state.backwards += 1
            if state.backwards == state.next_awaited:
                state.act_at_backward()
            if state.samples or state.tokens:
                state.count_batches(monitor)
            if not self._phase:
                self._first(monitor)
            clock.push((self._phase, monotonic_ns(), state.after_backward))
            state.in_backward = True
            return True
        except Exception as error:
            faults.swallow(error)
            return False

    def end(self) -> None:
        state = self._state
        try:
            state.in_backward = False
            if state.monitor is not None:
                state.monitor.clock.push((LEAVE, monotonic_ns(), None))
            if state.due is not None:
                due, state.due = state.due, self._ends
                state.end_step(due)
        except Exception as error:
            faults.swallow(error)

    def _first(self, monitor: Monitor) -> None:
        """Decide what surrounds backward, before anything of the log is settled."""
        state, phases = self._state, monitor.phases
        self._phase = phases["backward"].index
        is_loaded = state.loaded_by == monitor.clock.thread
        state.pair_phases(self._phase, phases["forward"].index if is_loaded else 0)
        if state.compiles and not state.updates:
            # The optimizer may be compiled, too.
            state.after_backward = phases["optimizer"].index

    def _look(self) -> None:
        """Lead, where nothing else can end a step as far as the last backwards show."""
        state, monitor = self._state, self._state.monitor
        patience = LEAD_AFTER * (WITH_AN_OPTIMIZER if _has_optimizer() else 1)
        state.when_backward(state.backwards + patience, self._look)
        progress, self._progress = self._progress, state.updates + state.batches
        if monitor is None or monitor.step_clock == SOURCE:
            return
        self._ends = None
        if progress == self._progress and state.backwards >= patience and monitor.lead(SOURCE):
            monitor.clock.restart()
            # This one ends nothing: what ran until its begin, and its batch, belong to no step.
            state.samples = state.tokens = 0
            state.due, self._ends = "", SOURCE


def _has_optimizer() -> bool:
    """Whether the program has made one: its class is then marked by torch."""
    optimizers = sys.modules.get("torch.optim")
    classes: list[Any] = [] if optimizers is None else [optimizers.Optimizer]
    for one in classes:
        if getattr(one.step, "hooked", False):
            return True
        classes.extend(one.__subclasses__())
    return False


_hooks: weakref.WeakKeyDictionary[HookState, BackwardHook] = weakref.WeakKeyDictionary()


def install(module: ModuleType, state: HookState) -> None:
    install_distributed(module.autograd, state)


def install_distributed(module: ModuleType, state: HookState) -> None:
    original = getattr(module, "backward", None)
    if original is None:
        return  # of a torch without RPC
    hook = _hooks.get(state)
    if hook is None:
        hook = _hooks[state] = BackwardHook(state)

    @wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if (state.compiles and state.is_compiling()) or not hook.begin():
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            hook.end()

    module.backward = backward  # type: ignore[attr-defined]
