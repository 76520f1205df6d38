"""The steps of the first optimizer seen are the clock; each optimizer's step is a phase.

A step of the training is one however often the optimizer is called for it: in sub-groups, inside of
a gradient scaler that skips it, or one optimizer for each parameter inside of backward. Where it
runs compiled, no hook sees it, and ``zero_grad``, which dynamo never traces, tells instead.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import wraps
from threading import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any

from warpwatch import faults
from warpwatch.columns import ENDED, UPDATED
from warpwatch.hooks.hook_state import Flow
from warpwatch.hooks.lap import BEGUN, TRAINED, UPDATING
from warpwatch.monitor import Monitor, Phase
from warpwatch.phase_times import OTHER
from warpwatch.steps import StepClock

SOURCE = "optimizer"
MODULE = "torch.optim.optimizer"
SCALER_MODULES = ("torch.amp.grad_scaler", "torch.cuda.amp.grad_scaler")
# Steps of one other optimizer without one of the clock's after which it is the clock.
TAKE_OVER_AFTER = 100
# Steps without a backward or new data after which there is more to training than we can see.
MAX_SUB_GROUPS = 64
# zero_grad after a backward without a step that was seen, where steps have been seen before.
BLIND_AFTER = 3


class OptimizerHooks:
    """What runs before and after ``step`` of optimizers and gradient scalers."""

    __slots__ = (
        "_alone", "_clock", "_closure", "_ends", "_flow", "_lap", "_phase", "_repeats", "_rival",
        "_rival_steps", "_running", "_unseen", "_updates_when_zeroed", "_used_when_begun",
        "_used_when_zeroed", "_zeroed", "alone_phase", "counted",
    )  # fmt: skip

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._lap = flow.lap
        flow.lap.optimizers = self
        self._clock: Callable[[], Any] = _nothing
        self._rival: weakref.ref[Any] | None = None
        self._rival_steps = 0
        # ids of what is inside of step, outermost first
        self._running: tuple[int, ...] = ()
        # The same while the clock's optimizer steps alone, if it did so before.
        self._alone: tuple[int, ...] | None = None
        self.alone_phase = OTHER
        self._phase: Phase | None = None
        self._ends = self._closure = False
        self.counted = self._repeats = self._used_when_begun = 0
        self._zeroed: weakref.ref[Any] | None = None
        self._used_when_zeroed = self._updates_when_zeroed = self._unseen = 0

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The global hook before ``Optimizer.step``."""
        lap = self._lap
        # A closure that trains would not come after a backward; one that does not is no matter.
        if lap.stage == TRAINED:
            alone = lap.optimizer
            if alone() is optimizer:
                lap.noted[UPDATED] = monotonic_ns()
                lap.stage = UPDATING
                return
        self._before_outside_of_laps(optimizer, args, kwargs)

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """The global hook after it."""
        lap = self._lap
        # Whoever takes over the step clock closes the running step.
        if lap.stage != UPDATING or get_ident() != lap.thread or not lap.clock.open:
            self._after_outside_of_laps(optimizer)
            return
        clock, noted, log = lap.clock, lap.noted, lap.log
        noted[ENDED] = now = monotonic_ns()
        lap.stage = BEGUN
        log(noted)
        clock.begun_ns = now
        clock.steps += 1
        if now >= clock.look_ns:
            clock.turned(now)
            if clock.capturing:
                lap.drop()

    def _before_outside_of_laps(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        flow = self._flow
        if flow.compiles and flow.is_compiling():
            return
        self._lap.leave()
        clock = flow.clock
        if (
            clock is None
            or self._clock() is not optimizer
            or self._alone is None
            or self._running
            or kwargs
            or len(args) > 1
            or flow.in_backward
            or not clock.open
            or get_ident() != clock.thread
        ):
            # With a closure, forward and backward run inside of the step.
            self.begin(optimizer, _has_closure(args[1:], kwargs))
            return
        self.step_alone(clock, monotonic_ns())

    def step_alone(self, clock: StepClock, now: int) -> None:
        """The clock's optimizer steps, alone as before."""
        if self._alone is not None:
            self._running = self._alone
            clock.push((self.alone_phase, now, None))

    def _after_outside_of_laps(self, optimizer: Any) -> None:
        flow = self._flow
        if flow.compiles and flow.is_compiling():
            return
        self._lap.leave()
        monitor = flow.monitor
        used = flow.backwards + flow.batches
        if (
            monitor is None
            or monitor.step_clock != SOURCE
            or self._running is not self._alone
            or used == self.counted
            or get_ident() != monitor.clock.thread
        ):
            self.end(optimizer, optimizer)
            return
        clock = monitor.clock
        now = monotonic_ns()
        self._running = ()
        self.counted = used
        flow.updates += 1
        clock.turn(now)
        flow.turned = clock
        self._lap.begin(monitor, self._clock)

    def begin(self, stepper: Any, closure: bool) -> None:
        flow = self._flow
        try:
            self._lap.leave()
            monitor = flow.attach()
            if monitor is None:
                return
            if not flow.in_backward:
                flow.begin_step(SOURCE)
            if not flow.here():
                return
            self._tell(monitor)
            if self._running and self._has_raised(stepper):
                self._reset()
            if not self._running:
                self._closure = closure
                self._used_when_begun = flow.backwards + flow.batches
                if not closure:
                    self._phase = monitor.phase("optimizer").__enter__()
            self._running += (id(stepper),)
        except Exception as error:
            faults.swallow(error)

    def end(self, stepper: Any, optimizer: Any) -> None:
        """``stepper`` is the optimizer, or the scaler that was to call it."""
        flow = self._flow
        try:
            self._lap.leave()
            if flow.monitor is None or not flow.here():
                self._end_elsewhere(optimizer)
                return
            self._tell(flow.monitor)
            alone = self._running if self._running == (id(optimizer),) else None
            if self._is_clock(optimizer):
                self._ends = True
            if self._running and self._running[-1] == id(stepper):
                self._running = self._running[:-1]
            if not self._running:
                self._end_outermost(alone)
        except Exception as error:
            faults.swallow(error)

    def abandon(self) -> None:
        """An exception has left the step."""
        try:
            self._lap.leave()
            self._reset()
        except Exception as error:
            faults.swallow(error)

    def zero_grad(self, optimizer: Any) -> None:
        """A step that nobody saw has ended when the gradients that backward made are dropped.

        Only the first optimizer that drops any tells, and only while no step is seen.
        """
        flow = self._flow
        try:
            self._lap.leave()
            if self._zeroed is None or self._zeroed() is None:
                self._zeroed = weakref.ref(optimizer)
            if self._zeroed() is not optimizer or self._used_when_zeroed == flow.backwards:
                return
            if self._running or flow.in_backward or not flow.here():
                return
            self._used_when_zeroed = flow.backwards
            if flow.updates != self._updates_when_zeroed:
                self._updates_when_zeroed = flow.updates
                self._unseen = 0
                return
            self._unseen += 1
            if flow.updates == 0 or self._unseen >= BLIND_AFTER:
                self._blind_step()
        except Exception as error:
            faults.swallow(error)

    def _has_raised(self, stepper: Any) -> bool:
        """Whether what was running has ended and nothing saw it, now that ``stepper`` begins.

        One that steps alone calls no other, and only a closure trains inside of a step.
        """
        if id(stepper) in self._running or self._running is self._alone:
            return True
        used = self._flow.backwards + self._flow.batches
        return not self._closure and used != self._used_when_begun

    def _tell(self, monitor: Monitor) -> None:
        """What was left out of the step of the clock's optimizer alone: it may not stay alone."""
        if self._running is self._alone:
            self._phase = monitor.phase("optimizer")

    def _end_outermost(self, alone: tuple[int, ...] | None) -> None:
        flow = self._flow
        flow.updates += 1
        self._alone = None
        phase = self._phase
        self._leave()
        if self._ends:
            self._ends = False
            if self._is_new():
                flow.end_step(SOURCE)
                if phase is not None and flow.backwards:
                    self._alone, self.alone_phase = alone, phase.index

    def _end_elsewhere(self, optimizer: Any) -> None:
        """Backward on a GPU runs in a thread of its own, which has no phases."""
        flow = self._flow
        if flow.in_backward:
            flow.updates += 1
            if self._is_clock(optimizer) and self._is_new():
                flow.end_step(SOURCE)

    def _blind_step(self) -> None:
        self._flow.begin_step(SOURCE)
        if self._flow.leads(SOURCE):
            self._flow.end_step(SOURCE)

    def _reset(self) -> None:
        self._running = ()
        self._ends = False
        self._leave()

    def _leave(self) -> None:
        phase, self._phase = self._phase, None
        if phase is not None:
            self._flow.switch("other")
            phase.__exit__(None, None, None)

    def _is_new(self) -> bool:
        """Whether anything was learnt since the last step that counted, as far as can be seen."""
        flow = self._flow
        if flow.backwards == 0:
            return True
        used = flow.backwards + flow.batches
        if used == self.counted and self._repeats < MAX_SUB_GROUPS:
            self._repeats += 1
            return False
        self._repeats = self._repeats if used == self.counted else 0
        self.counted = used
        return True

    def _is_clock(self, optimizer: Any) -> bool:
        """Several optimizers may step in one step of the training: one of them is its clock."""
        clock = self._clock()
        if clock is optimizer:
            self._rival = None
            return True
        if clock is not None:
            if self._rival is None or self._rival() is None:
                self._rival = weakref.ref(optimizer)
                self._rival_steps = 0
            self._rival_steps += self._rival() is optimizer
            if self._rival_steps < TAKE_OVER_AFTER:
                return False
        self._clock = weakref.ref(optimizer)
        self._rival = None
        return True


def _has_closure(args: Any, kwargs: Any) -> bool:
    """Of what ``step`` was called with; ``step(None)`` is one without."""
    closure = args[0] if args else kwargs.get("closure")
    return closure is not None


def _nothing() -> None:
    return None


_hooks: weakref.WeakKeyDictionary[Flow, OptimizerHooks] = weakref.WeakKeyDictionary()


def hooks_of(flow: Flow) -> OptimizerHooks:
    """The same for all that tells of optimizers."""
    found = _hooks.get(flow)
    if found is None:
        found = _hooks[flow] = OptimizerHooks(flow)
    return found


def install(module: ModuleType, flow: Flow) -> None:
    hooks = hooks_of(flow)
    module.register_optimizer_step_pre_hook(hooks.before)
    module.register_optimizer_step_post_hook(hooks.after)


def install_zero_grad(module: ModuleType, flow: Flow) -> None:
    """``module`` is torch. Without dynamo every step is seen.

    What the program has put in the place of ``zero_grad`` by then stays, inside of ours.
    """
    disable = getattr(module, "_disable_dynamo", None)
    if disable is None:
        return
    hooks = hooks_of(flow)
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

    flow.when_compiling(install)


def install_scaler(module: ModuleType, flow: Flow) -> None:
    """A scaler that finds an overflow does not call the optimizer: a step all the same."""
    scaler_class = module.GradScaler
    original = vars(scaler_class).get("step")
    if original is not None:
        scaler_class.step = _scaled(original, hooks_of(flow), flow)


def _scaled(original: Callable[..., Any], hooks: OptimizerHooks, flow: Flow) -> Callable[..., Any]:
    @wraps(original)
    def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if flow.is_compiling() or flow.off:
            return original(scaler, optimizer, *args, **kwargs)
        hooks.begin(scaler, _has_closure(args, kwargs))
        try:
            done = original(scaler, optimizer, *args, **kwargs)
        except BaseException:
            hooks.abandon()
            raise
        hooks.end(scaler, optimizer)
        return done

    return step
