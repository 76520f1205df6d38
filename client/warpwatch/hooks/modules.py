"""Hooks calls of the model, which are the phase ``forward`` if there is no DataLoader.

A global hook between two backwards finds the modules that the program calls itself, and again once
it calls none of them any more (the next layer, model or fold). Then calls are seen at their
classes. Up to some calls without gradients belong to a step (a teacher, a target network). More are
an evaluation, or a ``rollout`` if the module is in training mode. Under torch.compile only calls of
compiled modules are seen: no hook is in a graph.

With a DataLoader calls are not watched. There ``Module.eval`` between two steps starts an
evaluation: images, texts and scores made now and then come from no DataLoader.
"""

from __future__ import annotations

import weakref
from contextlib import suppress
from functools import wraps
from threading import get_ident
from types import ModuleType
from typing import Any

from warpwatch import faults
from warpwatch.hooks.dataloader import measure
from warpwatch.hooks.hook_state import HookState

MODULE = "torch"
# Calls without gradients in a row that may be part of a step.
TEACHERS = 4
MAX_MODULES = 64
# Backwards between two looks whether the program still calls the modules that it called.
LOOK_EVERY = 8
# Inputs in a row without token ids after which no more are looked at.
WORDLESS = 64


class _Called(set):  # type: ignore[type-arg]
    """The ids of modules of this process; pickling a class by its content leaves them out."""

    def __reduce__(self) -> Any:
        return set, ()


class ModuleHook:
    """The calls of the modules in ``_called`` (ids); ``_inside`` has the modules within them.

    ``_round`` is the number of backwards and updates at the last call, ``_looked`` at the last
    check. ``forward`` is the round whose forward the last call was part of, or -1. ``_phase`` is
    the last phase that a call started. ``_unlearned`` counts calls without gradients since,
    ``_wordless`` inputs without token ids in a row.
    """

    __slots__ = (
        "_called", "_classes", "_every", "_handle", "_inside", "_looked", "_orders", "_phase",
        "_round", "_torch", "_unlearned", "_wordless", "forward", "state",
    )  # fmt: skip

    def __init__(self, torch: Any, state: HookState) -> None:
        self._torch = torch
        self.state = state
        self._called = _Called()
        self._inside: set[int] = set()
        self._classes: list[Any] = []
        self._handle: Any = None
        self._phase = ""
        self._round = self._looked = self._unlearned = self._wordless = 0
        self._every = LOOK_EVERY
        self.forward = -1
        self._orders: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        """Leave it out of pickles, as ``_Called``: nothing calls it there."""
        return bool, ()

    def watch(self) -> None:
        """Watch which modules are called until ``watched``, if no known one was called lately.

        It is not done under torch.compile, which warns of such a hook.
        """
        state = self.state
        if state.batches or state.compiles or state.evaluating is not None:
            return
        looked, self._looked = self._looked, self._round
        if looked != self._round:
            state.when_backward(state.backwards + LOOK_EVERY, self.watch)
            return
        self._called.clear()
        self._inside.clear()
        hooks = self._torch.nn.modules.module
        self._handle = hooks.register_module_forward_pre_hook(self._see)
        state.when_backward(state.backwards + 2, self.watched)

    def watched(self) -> None:
        handle, self._handle = self._handle, None
        if handle is None:
            return
        handle.remove()
        for kind in self._classes:
            if "__call__" not in vars(kind):
                _hook_calls(kind, self._called, self)
        # Where there are none to be found, less and less often.
        self._every = LOOK_EVERY if self._called else 2 * self._every
        self.state.when_backward(self.state.backwards + self._every, self.watch)

    def compile(self) -> None:
        """Remove the hooks, because torch.compile may trace the modules."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        for kind in self._classes:
            if getattr(vars(kind).get("__call__"), "of_warpwatch", False):
                del kind.__call__

    def see_compiled(self, module: Any, args: Any) -> None:
        if not self.state.is_compiling():
            self.begin(module, args)

    def _see(self, module: Any, args: Any) -> None:
        try:
            if id(module) in self._inside or not self.state.in_training_thread():
                return
            kind = type(module)
            if len(self._called) < MAX_MODULES and (
                kind in self._classes or "__call__" not in vars(kind)
            ):
                self._called.add(id(module))
                with suppress(ValueError):  # a RemoteModule's are in another process
                    self._inside.update(map(id, module.modules()))
                if kind not in self._classes:
                    self._classes.append(kind)
        except Exception as error:
            faults.swallow(error)

    def begin(self, module: Any, args: Any) -> None:
        """Follow a call of a module by the program itself."""
        state, monitor = self.state, self.state.monitor
        if monitor is None or get_ident() != monitor.clock.thread:
            return
        if state.batches or state.evaluating is not None:
            return
        try:
            learns, calls = state.is_grad_enabled(), state.backwards + state.updates
            if calls != self._round:
                self._round, self._unlearned, self._phase = calls, 0, ""
            self._unlearned = 0 if learns else self._unlearned + 1
            self.forward = calls if learns else -1
            phase = "forward" if learns else self._phase or "forward"
            if self._unlearned > TEACHERS:
                phase = "rollout" if module.training else "eval"
            if phase != self._phase:
                self._phase = phase
                monitor.switch(phase)
                if learns and args and self._wordless < WORDLESS and not state.in_backward:
                    # Token ids are a batch of data; of anything else it is not known.
                    samples, tokens = measure(args[0])
                    if tokens:
                        state.samples = 0 if self._may_take_time_first(module) else samples
                        state.tokens = tokens
                    self._wordless = 0 if tokens else self._wordless + 1
        except Exception as error:
            faults.swallow(error)

    def _may_take_time_first(self, module: Any) -> bool:
        """Return whether a part of the module does; input rows are then not samples."""
        found = self._orders.get(module)
        if found is None:
            parts = module.modules()
            found = any(getattr(part, "batch_first", None) is False for part in parts)
            self._orders[module] = found
        return found


def _hook_calls(kind: Any, called: set[int], hook: ModuleHook) -> None:
    """Give the class a ``__call__`` of its own, above the current ``Module.__call__``."""

    def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
        # Most calls are further ones of a forward, and hundreds in a step where a policy acts: what
        # is new is asked without a call.
        if id(module) in called and (
            hook.forward != hook.state.backwards + hook.state.updates
            or not hook.state.is_grad_enabled()
        ):
            hook.begin(module, args)
        return super(kind, module).__call__(*args, **kwargs)

    __call__.of_warpwatch = True  # type: ignore[attr-defined]
    kind.__call__ = __call__


def install(module: Any, state: HookState) -> None:
    """Watch the modules; ``module`` is torch."""
    hook = ModuleHook(module, state)
    state.when_backward(3, hook.watch)
    state.when_compiling(hook.compile)


def install_compiled(module: Any, state: HookState) -> None:
    """Install the hook of compiled modules; ``module`` is dynamo's eval_frame."""
    hook = ModuleHook(None, state)
    compiled = module.OptimizedModule
    original = compiled.__call__

    @wraps(original)
    def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
        hook.see_compiled(module, args)
        return original(module, *args, **kwargs)

    compiled.__call__ = __call__


# Steps from one evaluation to the next: a part of the model is put into eval() at every one.
APART = 2


class EvalHook:
    """The code around ``Module.eval``; ``_steps`` is the number of steps at its last call."""

    __slots__ = ("_state", "_steps")

    def __init__(self, state: HookState) -> None:
        self._state = state
        self._steps = -APART

    @faults.guarded
    def called(self) -> None:
        """Start ``eval``, up to the next training batch, backward or end of a step."""
        state = self._state
        if state.evaluating or not state.batches or not state.in_training_thread():
            return
        # If no backward has used the batch yet, the call may prepare a teacher.
        if state.samples or state.tokens or state.in_backward or state.monitor is None:
            return
        before, self._steps = self._steps, state.monitor.clock.steps
        if self._steps - before >= APART:
            state.switch("eval")


def install_eval(module: ModuleType, state: HookState) -> None:
    hook = EvalHook(state)
    modules = module.nn.Module
    original = modules.eval

    @wraps(original)
    def eval(self: Any) -> Any:
        if not (state.compiles and state.is_compiling()):
            hook.called()
        return original(self)

    modules.eval = eval
