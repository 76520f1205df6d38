"""Hooks calls of the model: without a DataLoader they start ``forward``, ``eval`` or ``rollout``.

A global hook, set for two backwards, finds the modules that the program itself calls. Then only
their classes are hooked. If the program calls none of them any more (another layer, model or fold),
the search is repeated. Up to MAX_WITHOUT_GRADIENTS calls without gradients in a row belong to a
step (a teacher, a target network). More are an evaluation, or a ``rollout`` if the module is in
training mode. Under torch.compile only calls of compiled modules are seen: no hook is in a graph.

With a DataLoader calls are not watched, only ``Module.eval``: between two steps it starts an
evaluation, because images, texts and scores for it often come without a DataLoader.
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
MAX_WITHOUT_GRADIENTS = 4
MAX_MODULES = 64
# The number of backwards after which to check that the program still calls the modules found.
CHECK_EVERY = 8
# After this many inputs in a row without token ids, inputs are no longer measured.
MAX_WITHOUT_TOKENS = 64


class _Called(set):  # type: ignore[type-arg]
    """The ids of modules of this process, left out if a hooked class is pickled by value."""

    def __reduce__(self) -> Any:
        return set, ()


class ModuleHook:
    """The hooks of the modules that the program calls, and the phase that their calls started.

    ``_called`` are the ids of these modules, ``_inside`` those of all their parts, ``_classes``
    their classes. A round is a number of backwards and updates: ``_round`` at the last call,
    ``_checked`` at the last check, ``forward`` at the last call if it had gradients, else -1.
    ``_without_gradients`` counts calls, and ``_without_tokens`` inputs, in a row.
    ``_time_first`` has the results of ``_may_take_time_first``.
    """

    __slots__ = (
        "_called", "_checked", "_classes", "_every", "_handle", "_inside", "_phase", "_round",
        "_time_first", "_torch", "_without_gradients", "_without_tokens", "forward", "state",
    )  # fmt: skip

    def __init__(self, torch: Any, state: HookState) -> None:
        self._torch = torch
        self.state = state
        self._called = _Called()
        self._inside: set[int] = set()
        self._classes: list[Any] = []
        self._handle: Any = None
        self._phase = ""
        self._round = self._checked = self._without_gradients = self._without_tokens = 0
        self._every = CHECK_EVERY
        self.forward = -1
        self._time_first: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def __reduce__(self) -> Any:
        """Leave the hook out of pickles, as ``_Called``: nothing calls it there."""
        return bool, ()

    def search(self) -> None:
        """Search for called modules, for two backwards, if no known module was called lately."""
        state = self.state
        # torch.compile warns of a global hook.
        if state.batches or state.compiles or state.evaluating is not None:
            return
        checked, self._checked = self._checked, self._round
        if checked != self._round:
            state.when_backward(state.backwards + CHECK_EVERY, self.search)
            return
        self._called.clear()
        self._inside.clear()
        hooks = self._torch.nn.modules.module
        self._handle = hooks.register_module_forward_pre_hook(self._found)
        state.when_backward(state.backwards + 2, self.end_search)

    def end_search(self) -> None:
        if not self._stop_search():
            return
        for kind in self._classes:
            if "__call__" not in vars(kind):
                _hook_calls(kind, self._called, self)
        # If no module was found, the next search is later each time.
        self._every = CHECK_EVERY if self._called else 2 * self._every
        self.state.when_backward(self.state.backwards + self._every, self.search)

    def _stop_search(self) -> bool:
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()
        return handle is not None

    def compile(self) -> None:
        """Remove the hooks, because torch.compile may trace the modules."""
        self._stop_search()
        for kind in self._classes:
            if getattr(vars(kind).get("__call__"), "of_warpwatch", False):
                del kind.__call__

    @faults.guarded
    def _found(self, module: Any, args: Any) -> None:
        """Add a module that is called in the search, unless it is a part of one found before."""
        if id(module) in self._inside or not self.state.in_training_thread():
            return
        kind = type(module)
        if len(self._called) < MAX_MODULES and (
            kind in self._classes or "__call__" not in vars(kind)
        ):
            self._called.add(id(module))
            with suppress(ValueError):  # the parts of a RemoteModule are in another process
                self._inside.update(map(id, module.modules()))
            if kind not in self._classes:
                self._classes.append(kind)

    def begin(self, module: Any, args: Any) -> None:
        """Start the phase of a call that the program makes, if it is another one."""
        state, monitor = self.state, self.state.monitor
        if monitor is None or get_ident() != monitor.clock.thread:
            return
        if state.batches or state.evaluating is not None:
            return
        try:
            learns, now = state.is_grad_enabled(), state.backwards + state.updates
            if now != self._round:
                self._round, self._without_gradients, self._phase = now, 0, ""
            self._without_gradients = 0 if learns else self._without_gradients + 1
            self.forward = now if learns else -1
            phase = "forward" if learns else self._phase or "forward"
            if self._without_gradients > MAX_WITHOUT_GRADIENTS:
                phase = "rollout" if module.training else "eval"
            if phase != self._phase:
                self._phase = phase
                monitor.switch(phase)
                is_measured = learns and self._without_tokens < MAX_WITHOUT_TOKENS
                if is_measured and args and not state.in_backward:
                    # Token ids are a batch of data; any other input may be something else.
                    samples, tokens = measure(args[0])
                    if tokens:
                        state.samples = 0 if self._may_take_time_first(module) else samples
                        state.tokens = tokens
                    self._without_tokens = 0 if tokens else self._without_tokens + 1
        except Exception as error:
            faults.swallow(error)

    def _may_take_time_first(self, module: Any) -> bool:
        """Return whether a part of the module takes time first; the rows are then not samples."""
        found = self._time_first.get(module)
        if found is None:
            parts = module.modules()
            found = any(getattr(part, "batch_first", None) is False for part in parts)
            self._time_first[module] = found
        return found


def _hook_calls(kind: Any, called: set[int], hook: ModuleHook) -> None:
    """Give the class a ``__call__`` of its own, above the current ``Module.__call__``."""

    def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
        # Most calls continue a forward, and a step in which a policy acts has hundreds of calls:
        # this check for a new phase needs no call of ours.
        if id(module) in called and (
            hook.forward != hook.state.backwards + hook.state.updates
            or not hook.state.is_grad_enabled()
        ):
            hook.begin(module, args)
        return super(kind, module).__call__(*args, **kwargs)

    __call__.of_warpwatch = True  # type: ignore[attr-defined]
    kind.__call__ = __call__


def install(module: Any, state: HookState) -> None:
    """Install the hook of modules; ``module`` is torch."""
    hook = ModuleHook(module, state)
    state.when_backward(3, hook.search)
    state.when_compiling(hook.compile)


def install_compiled(module: Any, state: HookState) -> None:
    """Install the hook of compiled modules; ``module`` is dynamo's eval_frame."""
    hook = ModuleHook(None, state)
    compiled = module.OptimizedModule
    original = compiled.__call__

    @wraps(original)
    def __call__(module: Any, *args: Any, **kwargs: Any) -> Any:
        if not state.is_compiling():
            hook.begin(module, args)
        return original(module, *args, **kwargs)

    compiled.__call__ = __call__


# If eval() is called at every step, it freezes a part of the model: an evaluation comes at most
# every second step.
MIN_STEPS_BETWEEN = 2


class EvalHook:
    """The code around ``Module.eval``; ``_steps`` is the number of steps at its last call."""

    __slots__ = ("_state", "_steps")

    def __init__(self, state: HookState) -> None:
        self._state = state
        self._steps = -MIN_STEPS_BETWEEN

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
        if self._steps - before >= MIN_STEPS_BETWEEN:
            state.switch("eval")


def install_eval(module: ModuleType, state: HookState) -> None:
    hook = EvalHook(state)
    base = module.nn.Module
    original = base.eval

    @wraps(original)
    def eval(self: Any) -> Any:
        if not (state.compiles and state.is_compiling()):
            hook.called()
        return original(self)

    base.eval = eval
