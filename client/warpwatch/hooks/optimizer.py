"""Hooks optimizers: one of them is the clock (see ClockChoice), each one's step is a phase.

A training step may call optimizers repeatedly: in sub-groups, in a gradient scaler that skips it,
or one per parameter inside backward. If the optimizer is compiled, no hook sees it, and
``zero_grad``, which dynamo never traces, ends the step instead.

dynamo must not compile our frames: a function that torch.compile breaks out of runs its callees
under dynamo. Calls that dynamo traces itself (optimizer hooks) check ``is_compiling``.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial, wraps
from threading import get_ident
from time import monotonic_ns
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from warpwatch import faults
from warpwatch.hooks.hook_state import ClockChoice, HookState
from warpwatch.model import Parameters
from warpwatch.monitor import Monitor
from warpwatch.step_times import LEAVE, OTHER, SWITCH
from warpwatch.steps import StepClock

SOURCE = "optimizer"
MODULE = "torch.optim.optimizer"
SCALER_MODULES = ("torch.amp.grad_scaler", "torch.cuda.amp.grad_scaler")
# Methods of other libraries that end with an update of the model: module, class, method.
OTHERS = {
    "fastai.optimizer": ("Optimizer", "step"),
    "keras.src.optimizers.base_optimizer": ("BaseOptimizer", "apply"),
    "torch.distributed.optim.optimizer": ("DistributedOptimizer", "step"),
}
# Keras on other libraries traces its updates.
_KERAS_ON_TORCH = "keras.src.backend.torch"
# Steps without a backward or new data after which there is more to training than we can see.
MAX_SUB_GROUPS = 64
# zero_grad after a backward without a step that was seen, where steps have been seen before.
BLIND_AFTER = 3
# A program's own optimizer may take something else in the place of the closure: a tensor, a module.
_CLOSURES = (FunctionType, MethodType, partial)


class OptimizerHooks:
    """The code before and after ``step`` of optimizers and gradient scalers."""

    __slots__ = (
        "_choice", "_clock", "_closure", "_counted", "_ends", "_is_forward", "_parameters",
        "_phase", "_repeats", "_running", "_state", "_timed", "_unseen", "_updates_when_zeroed",
        "_used_by_others", "_used_when_begun", "_used_when_zeroed", "_zeroed",
    )  # fmt: skip

    def __init__(self, state: HookState) -> None:
        self._state = state
        self._clock: Callable[[], Any] = type(None)
        self._choice = ClockChoice()
        self._parameters = Parameters()
        # ids of what is inside of step, outermost first; whether that is a phase, and which
        self._running: list[int] = []
        self._timed = False
        self._phase = 0
        self._ends = self._closure = False
        self._counted = self._repeats = self._used_when_begun = self._used_by_others = 0
        # Where no optimizer's step is seen: whether forward is what no hook has a name for.
        self._is_forward: bool | None = None
        self._zeroed: weakref.ref[Any] | None = None
        self._used_when_zeroed = self._updates_when_zeroed = self._unseen = 0

    def before(self, stepper: Any, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Start the phase before ``step`` of an optimizer (as its global hook) or a scaler.

        ``args`` and ``kwargs`` are the call's; ``args`` includes the optimizer. If the call has a
        closure, which runs forward and backward, return them with a timed one.
        """
        state = self._state
        if state.compiles and state.is_compiling():
            return None
        try:
            monitor = state.monitor or state.attach()
            if monitor is None:
                return None
            clock = monitor.clock
            is_led = clock.open and monitor.step_clock == SOURCE and get_ident() == clock.thread
            if not is_led and not self._begin_step(clock):
                return None
            if self._running and self._has_raised(stepper):
                self.reset()
            if not self._running:
                self._used_when_begun = state.backwards + state.batches
                if not self._phase:
                    self._phase = monitor.phases["optimizer"].index
                closure = kwargs.get("closure") if kwargs else None
                if len(args) > 1:
                    closure = args[1] if isinstance(args[1], _CLOSURES) else None
                self._closure = closure is not None
                if self._closure:
                    self._running.append(id(stepper))
                    return self._with_closure(monitor, closure, args, kwargs)
                clock.push((self._phase, monotonic_ns(), None))
                self._timed = True
            self._running.append(id(stepper))
        except Exception as error:
            faults.swallow(error)
        return None

    def after(self, optimizer: Any, args: Any, kwargs: Any, scaler: Any = None) -> None:
        """End the phase after ``step``; ``scaler`` was to call the optimizer."""
        state = self._state
        if state.compiles and state.is_compiling():
            return
        try:
            monitor = state.monitor
            if monitor is None or get_ident() != monitor.clock.thread:
                self._end_in_another_thread(optimizer)
                return
            if self._clock() is optimizer or self._becomes_clock(optimizer, monitor):
                self._ends = True
            running = self._running
            if running and running[-1] == id(optimizer if scaler is None else scaler):
                running.pop()
            if running:
                return
            now = monotonic_ns()
            state.after_backward = OTHER
            if self._timed:
                self._timed = False
                monitor.clock.push((LEAVE, now, OTHER))
            elif self._closure:
                monitor.clock.push((SWITCH, now, OTHER))
            state.updates += 1
            ends, self._ends = self._ends, False
            if ends and self._is_new():
                state.end_step(SOURCE, now)
        except Exception as error:
            faults.swallow(error)

    def zero_grad(self, optimizer: Any) -> None:
        """End a step that no hook saw, because the gradients of backward are dropped.

        Only the first optimizer that drops gradients counts, and only while no step is seen.
        """
        state = self._state
        if state.updates != self._updates_when_zeroed:
            self._updates_when_zeroed, self._used_when_zeroed = state.updates, state.backwards
            self._unseen = 0
            return
        try:
            if self._zeroed is None or self._zeroed() is None:
                self._zeroed = weakref.ref(optimizer)
            if self._zeroed() is not optimizer or self._used_when_zeroed == state.backwards:
                return
            if self._running or state.in_backward or not state.in_training_thread():
                return
            self._used_when_zeroed = state.backwards
            self._unseen += 1
            if state.updates == 0 or self._unseen >= BLIND_AFTER:
                self._blind_step()
        except Exception as error:
            faults.swallow(error)

    def _with_closure(
        self, monitor: Monitor, closure: Any, args: Any, kwargs: Any
    ) -> tuple[Any, Any]:
        """Return the arguments with a closure that is timed each time it is called."""
        state, clock, around = self._state, monitor.clock, self._phase
        forward = monitor.phases["forward"].index

        @wraps(closure)
        def timed(*of_call: Any, **named: Any) -> Any:
            clock.push((SWITCH, monotonic_ns(), forward))
            try:
                return closure(*of_call, **named)
            finally:
                clock.push((SWITCH, monotonic_ns(), around))

        state.after_backward = around
        clock.push((SWITCH, monotonic_ns(), around))
        if len(args) > 1:
            return (args[0], timed, *args[2:]), kwargs
        return args, {**kwargs, "closure": timed}

    def _has_raised(self, stepper: Any) -> bool:
        """Return whether the running step has ended unseen: only a closure trains inside one."""
        if id(stepper) in self._running:
            return True
        used = self._state.backwards + self._state.batches
        return not self._closure and used != self._used_when_begun

    def _begin_step(self, clock: StepClock) -> bool:
        """Start a step if possible; return whether this is the training thread."""
        state = self._state
        is_here = get_ident() == clock.thread
        if not (state.in_backward if is_here else state.in_autograd_thread()):
            state.begin_step(SOURCE)
        return get_ident() == clock.thread

    def _end_in_another_thread(self, optimizer: Any) -> None:
        """End a step in autograd's thread on a GPU, without phases; ignore other threads."""
        state, monitor = self._state, self._state.monitor
        if monitor is None:
            return
        if not state.in_autograd_thread():
            state.elsewhere += 1
            monitor.clock.steps_elsewhere += monitor.step_clock == SOURCE
            return
        state.updates += 1
        is_clock = self._clock() is optimizer or self._becomes_clock(optimizer, monitor)
        if is_clock and self._is_new():
            state.end_step(SOURCE)

    def _blind_step(self) -> None:
        """End a compiled step; until backward it is ``forward`` if nothing else reports that."""
        state, monitor = self._state, self._state.monitor
        state.begin_step(SOURCE)
        if monitor is not None and state.leads(SOURCE):
            state.end_step(SOURCE)
            state.after_backward = monitor.phases["optimizer"].index
            if self._is_forward is None:
                self._is_forward = "forward" not in monitor.clock.phase_names
            if self._is_forward and not state.batches:
                state.switch("forward")

    @faults.guarded
    def reset(self) -> None:
        """Forget the running steps, because one raised."""
        self._running.clear()
        self._ends = False
        self._state.after_backward = OTHER
        if self._timed and self._state.monitor is not None:
            self._timed = False
            self._state.monitor.clock.push((LEAVE, monotonic_ns(), OTHER))

    def _is_new(self) -> bool:
        """Return whether anything was learnt since the last counted step."""
        state = self._state
        used = state.backwards + state.batches
        if used != self._counted:
            self._counted, self._repeats = used, 0
            return True
        if state.backwards and self._repeats < MAX_SUB_GROUPS:
            self._repeats += 1
            return False
        return True

    def _becomes_clock(self, optimizer: Any, monitor: Monitor) -> bool:
        """Return whether ``optimizer`` has become the clock and its step ends a training step.

        Several optimizers may step in one training step; one of them is its clock.
        """
        state = self._state
        if not self._parameters.know(optimizer):
            monitor.model = self._parameters.add(optimizer)
        used = state.backwards + state.batches
        if state.backwards and used in (self._counted, self._used_by_others):
            return False  # with the gradients that one before it has used
        self._used_by_others = used
        if not self._choice.takes_over(optimizer, self._clock(), monitor.clock):
            return False
        self._clock = weakref.ref(optimizer)
        # Another training starts: earlier optimizers do not belong to its model.
        self._parameters = Parameters()
        monitor.model = self._parameters.add(optimizer)
        return not self._choice.gives_back


@lru_cache(maxsize=1)
def hooks_of(state: HookState) -> OptimizerHooks:
    """Return the process's one object for all hooks about optimizers."""
    return OptimizerHooks(state)


def install(module: ModuleType, state: HookState) -> None:
    hooks = hooks_of(state)
    module.register_optimizer_step_pre_hook(hooks.before)
    module.register_optimizer_step_post_hook(hooks.after)


def install_zero_grad(module: ModuleType, state: HookState) -> None:
    """Wrap ``zero_grad`` if torch has dynamo; otherwise every step is seen.

    ``module`` is torch. A ``zero_grad`` that the program has replaced stays, inside ours.
    """
    disable = getattr(module, "_disable_dynamo", None)
    if disable is None:
        return
    hooks = hooks_of(state)
    optimizers = module.optim.Optimizer
    pristine = optimizers.zero_grad

    def install() -> None:
        original = optimizers.zero_grad
        if original is pristine:
            # Without the wrapper that keeps dynamo off: the new one gets its own.
            original = getattr(original, "__wrapped__", original)

        # Not its attributes: once it was called, one is torch's way past any wrapper.
        @wraps(original, updated=())
        def zero_grad(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            hooks.zero_grad(optimizer)
            return original(optimizer, *args, **kwargs)

        optimizers.zero_grad = disable(zero_grad)

    state.when_compiling(install)


def install_scaler(module: ModuleType, state: HookState) -> None:
    """Wrap the scaler: on an overflow it skips the optimizer, which is still a step."""

    def optimizer_of(scaler: Any, optimizer: Any = None, *_: Any, **__: Any) -> Any:
        return optimizer

    _hook_updates(module.GradScaler, "step", state, optimizer_of)


def install_other(module: ModuleType, state: HookState) -> None:
    owner, name = OTHERS[module.__name__]
    if "keras" not in module.__name__ or _KERAS_ON_TORCH in sys.modules:
        _hook_updates(getattr(module, owner), name, state, lambda optimizer, *_, **__: optimizer)


def _hook_updates(
    owner: Any, name: str, state: HookState, optimizer_of: Callable[..., Any]
) -> None:
    """Wrap an update; ``optimizer_of`` returns the optimizer that a call uses."""
    original, hooks = vars(owner).get(name), hooks_of(state)
    if original is None:
        return

    @wraps(original)
    def step(stepper: Any, *args: Any, **kwargs: Any) -> Any:
        if state.is_compiling() or state.off:
            return original(stepper, *args, **kwargs)
        hooks.before(stepper, (stepper,), {})
        try:
            done = original(stepper, *args, **kwargs)
        except BaseException:
            hooks.reset()
            raise
        hooks.after(optimizer_of(stepper, *args, **kwargs), args, kwargs, stepper)
        return done

    setattr(owner, name, step)


DYNAMO = "torch._dynamo.eval_frame"
_OURS = "warpwatch."


def install_dynamo(module: ModuleType, state: HookState) -> None:
    for name, ours in list(sys.modules.items()):
        if name.startswith(_OURS):
            for code in codes(ours):
                module.skip_code(code)
    optimizers = getattr(sys.modules.get("torch.optim.optimizer"), "Optimizer", None)
    patcher = module.TorchPatcher
    original = patcher.patch
    hooks = hooks_of(state)

    @wraps(original)
    def patch() -> None:
        original()
        if optimizers is not None:
            restore(optimizers, hooks)

    patcher.patch = staticmethod(patch)


def codes(module: ModuleType) -> Iterator[CodeType]:
    """Yield the code of all functions of the module, including nested and wrapped ones."""
    spaces: list[Mapping[str, Any]] = [vars(module)]
    spaces += [vars(value) for value in vars(module).values() if isinstance(value, type)]
    waiting: list[Any] = []
    for space in spaces:
        functions = (value for value in space.values() if isinstance(value, FunctionType))
        # What ``faults.guarded`` has wrapped is in another module.
        waiting += [getattr(found, "__wrapped__", found).__code__ for found in functions]
    while waiting:
        code = waiting.pop()
        if code.co_filename == module.__file__:
            yield code
            waiting += [inner for inner in code.co_consts if isinstance(inner, CodeType)]


def restore(optimizers: Any, hooks: OptimizerHooks) -> None:
    """Restore the hooks that the first torch.compile removes before PyTorch 2.9."""
    wrapper = optimizers.profile_hook_step(restore).__code__
    classes = [optimizers]
    while classes:
        found = classes.pop()
        classes += found.__subclasses__()
        step = vars(found).get("step")
        stripped = getattr(step, "hooked", False) and step.__code__ is not wrapper
        if stripped and not _hooked_inside(step, wrapper):
            found.step = _stepping(step, hooks)


def _hooked_inside(step: Any, wrapper: CodeType) -> bool:
    """Return whether torch.compile has wrapped the hooked step."""
    while step is not None:
        if getattr(step, "__code__", None) is wrapper:
            return True
        step = getattr(step, "__wrapped__", None)
    return False


def _stepping(original: Callable[..., Any], hooks: OptimizerHooks) -> Callable[..., Any]:
    @wraps(original)
    def step(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hooks.before(args[0], args, kwargs) or (args, kwargs)
        done = original(*args, **kwargs)
        hooks.after(args[0], args, kwargs)
        return done

    return step
