"""What DistributedDataParallel waits for is the phase ``comm``: from the last gradient to the end
of backward.

Its reducer works inside backward, in C++, so the border is a hook on the parameter whose gradient
comes last. Which one that is shows in the first synchronized backwards, with a hook on each.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from types import ModuleType
from typing import Any

from warpwatch import faults
from warpwatch.borders import OTHER
from warpwatch.hooks.hook_state import HookState

MODULE = "torch.nn.parallel.distributed"
PHASE = "comm"
# Synchronized forwards in a row without the last gradient, as when its parameter was frozen.
MAX_MISSED = 8
# Backwards that may end with a gradient each of their own before the latest is taken.
MAX_LEARNED = 8


class LastGradient:
    """Of one DDP module: the hooks on its parameters.

    ``prepare`` is called in the training thread; the hooks run where autograd does, which on a GPU
    is another thread while the training thread is inside backward.
    """

    def __init__(self, state: HookState) -> None:
        self._state = state
        self._handles: list[Any] = []
        self._learning = False
        self._learned = 0
        self._latest: weakref.ref[Any] | None = None
        self._last: weakref.ref[Any] | None = None
        self._synchronized = False
        self._missed = 0
        self._comm = OTHER

    def prepare(self, module: Any, synchronized: bool) -> None:
        """A forward ended whose backward communicates, or under ``no_sync`` does not."""
        self._synchronized = synchronized
        monitor = self._state.monitor
        if monitor is not None:
            self._comm = monitor.phase(PHASE).index
        if not synchronized:
            return
        if self._learning:
            self._learn()
        else:
            self._missed += 1
            if not self._handles or self._missed > MAX_MISSED:
                self._begin_to_learn(module)

    def _begin_to_learn(self, module: Any) -> None:
        self._remove()
        self._learning = True
        self._learned = 0
        self._latest = self._last = None
        ignored = getattr(module, "parameters_to_ignore", ())
        for name, parameter in module.module.named_parameters():
            if parameter.requires_grad and name not in ignored:
                self._handles.append(_hook(parameter, self._arrival_of(parameter)))

    def _learn(self) -> None:
        """The second backward that ends with the same gradient decides."""
        latest, self._latest = self._latest, None
        parameter = latest() if latest is not None else None
        if parameter is None:
            return
        self._learned += 1
        known = self._last() if self._last is not None else None
        if known is not parameter and self._learned < MAX_LEARNED:
            self._last = latest
            return
        self._remove()
        self._learning = False
        self._missed = 0
        self._handles.append(_hook(parameter, self._last_arrived))

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _arrival_of(self, parameter: Any) -> Callable[[Any], None]:
        reference = weakref.ref(parameter)

        def arrived(_: Any) -> None:
            if self._synchronized:
                self._latest = reference

        return arrived

    def _last_arrived(self, _: Any) -> None:
        """Backward becomes ``comm``, up to its end.

        The training thread is inside the call of backward, so this thread may write its log.
        """
        try:
            self._missed = 0
            monitor = self._state.monitor
            if monitor is not None and self._synchronized and self._state.in_backward:
                monitor.clock.replace_innermost(self._comm)
        except Exception as error:
            faults.swallow(error)


def install(module: ModuleType, state: HookState) -> None:
    data_parallel = module.DistributedDataParallel
    original = getattr(data_parallel, "_post_forward", None)
    if original is None:
        return
    known: weakref.WeakKeyDictionary[Any, LastGradient] = weakref.WeakKeyDictionary()

    @functools.wraps(original)
    def _post_forward(self: Any, output: Any) -> Any:
        if state.is_compiling():
            return original(self, output)
        try:
            if not state.off and state.is_grad_enabled() and _reduces_in_backward(self):
                if self not in known:
                    known[self] = LastGradient(state)
                known[self].prepare(self, self.require_backward_grad_sync)
        except Exception as error:
            faults.swallow(error)
        return original(self, output)

    data_parallel._post_forward = _post_forward


def _reduces_in_backward(module: Any) -> bool:
    """Not where a compiled reducer or one collective for all gradients stands in for it."""
    return not (
        getattr(module, "_use_python_reducer", False)
        or getattr(module, "_delay_all_reduce_all_params", False)
    )


def _hook(parameter: Any, function: Callable[[Any], None]) -> Any:
    register = getattr(parameter, "register_post_accumulate_grad_hook", parameter.register_hook)
    return register(function)
