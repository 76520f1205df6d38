"""Hooks backward, the phase ``backward``; the first call makes the process a rank.

``Tensor.backward`` calls ``torch.autograd.backward`` by its name, so that function is wrapped. If
nothing else can end a step, each backward does.

The wait of DistributedDataParallel, from the last gradient to the end of backward, is the phase
``comm``. Its reducer works inside backward, in C++, so the boundary is a hook on the parameter
whose gradient comes last. The first synchronized backwards, with a hook on each parameter, show
which.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from threading import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any

from warpwatch import faults
from warpwatch.hooks.hook_state import HookState
from warpwatch.monitor import Monitor
from warpwatch.step_times import LEAVE, OTHER

SOURCE = "backward"
MODULE = "torch"
# The backward of RPC, in which gradients pass from process to process.
DISTRIBUTED_MODULE = "torch.distributed.autograd"
# With these sources of the step clock the first backward may start a step.
_AUTOMATIC = ("", "optimizer", "dataloader", SOURCE)
# After this many backwards without a batch or an optimizer step each backward is a step. If there
# is an optimizer, which may accumulate gradients, the number is multiplied.
LEAD_AFTER = 64
WITH_AN_OPTIMIZER = 10


class BackwardHook:
    """The code around ``backward``. ``_ends`` is the source whose step each backward ends, if any.

    ``_progress`` counts updates and batches at the last check whether anything else ends steps.
    """

    __slots__ = ("_ends", "_phase", "_progress", "_state")

    def __init__(self, state: HookState) -> None:
        self._state = state
        self._phase = 0
        self._progress = 0
        self._ends: str | None = None
        state.when_backward(LEAD_AFTER, self._check_lead)

    def begin(self) -> bool:
        """Start the phase; return whether ``end`` has to follow.

        It has to in the training thread, unless inside another backward. The first backward makes
        the process a rank and starts its first step.
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
            if not self._phase:
                self._first(monitor)
            if state.samples or state.tokens:
                state.count_batches(monitor)
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
        """Decide which phases surround backward, before the log is settled."""
        state, phases = self._state, monitor.phases
        self._phase = phases["backward"].index
        is_loaded = state.loaded_by == monitor.clock.thread
        if state.loaded_by and not is_loaded:
            # The rest of the batches is read in a background thread, where none is seen.
            state.batches = state.samples = state.tokens = 0
        state.pair_phases(self._phase, phases["forward"].index if is_loaded else 0)
        if state.compiles and not state.updates:
            # The optimizer may be compiled, too.
            state.after_backward = phases["optimizer"].index

    def _check_lead(self) -> None:
        """Set the step clock if the last backwards show that nothing else ends a step."""
        state, monitor = self._state, self._state.monitor
        patience = LEAD_AFTER * (WITH_AN_OPTIMIZER if _has_optimizer() else 1)
        state.when_backward(state.backwards + patience, self._check_lead)
        progress, self._progress = self._progress, state.updates + state.batches
        if monitor is None or monitor.step_clock == SOURCE:
            return
        self._ends = None
        if progress == self._progress and state.backwards >= patience and monitor.lead(SOURCE):
            monitor.clock.restart()
            # This backward ends no step: the time before it and its batch belong to none.
            state.samples = state.tokens = 0
            state.due, self._ends = "", SOURCE


def _has_optimizer() -> bool:
    """Return whether the program has made an optimizer: torch then marks its class."""
    optimizers = sys.modules.get("torch.optim")
    classes: list[Any] = [] if optimizers is None else [optimizers.Optimizer]
    for one in classes:
        if getattr(one.step, "hooked", False):
            return True
        classes.extend(one.__subclasses__())
    return False


_hook_of = functools.lru_cache(maxsize=1)(BackwardHook)


def install(module: ModuleType, state: HookState) -> None:
    install_distributed(module.autograd, state)


def install_distributed(module: ModuleType, state: HookState) -> None:
    original = getattr(module, "backward", None)
    if original is None:
        return  # of a torch without RPC
    hook = _hook_of(state)

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if (state.compiles and state.is_compiling()) or not hook.begin():
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            hook.end()

    module.backward = backward  # type: ignore[attr-defined]
    _let_script_compile(backward, original)


def _let_script_compile(wrapper: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Give TorchScript the wrapper as the builtin that it has for the original."""
    script: Any = sys.modules.get("torch.jit._builtins")
    for function, builtin in getattr(script, "_builtin_ops", ()):
        if function is original:
            script._builtin_ops.append((wrapper, builtin))
            # It has the ids of all builtins from the first use of TorchScript on.
            if script._builtin_table is not None:
                script._builtin_table[id(wrapper)] = builtin
            return


DDP_MODULE = "torch.nn.parallel.distributed"
PHASE = "comm"
# Synchronized forwards in a row without the last gradient, as when its parameter was frozen.
MAX_MISSED = 8
# Backwards that may end with a gradient each of their own before the latest is taken.
MAX_LEARNED = 8


class LastGradient:
    """The hooks on the parameters of one DDP module.

    ``prepare`` is called in the training thread. The hooks run in autograd's thread, on a GPU
    another one, while the training thread is inside backward.
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
        """Follow a forward whose backward communicates, or under ``no_sync`` does not."""
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
        """Decide at the second backward that ends with the same gradient."""
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
        """Switch from backward to ``comm``, up to its end.

        The training thread is inside backward, so this thread may write its log.
        """
        try:
            self._missed = 0
            monitor = self._state.monitor
            if monitor is not None and self._synchronized and self._state.in_backward:
                monitor.clock.replace_innermost(self._comm)
        except Exception as error:
            faults.swallow(error)


def install_ddp(module: ModuleType, state: HookState) -> None:
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
    """Return False if a compiled reducer or one collective for all gradients replaces it."""
    return not (
        getattr(module, "_use_python_reducer", False)
        or getattr(module, "_delay_all_reduce_all_params", False)
    )


def _hook(parameter: Any, function: Callable[[Any], None]) -> Any:
    register = getattr(parameter, "register_post_accumulate_grad_hook", parameter.register_hook)
    return register(function)
