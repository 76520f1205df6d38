"""The post hook of the first optimizer seen ends a step; each optimizer's step is a phase."""

from __future__ import annotations

import weakref
from types import ModuleType
from typing import Any

from warpwatch.client import faults
from warpwatch.client.hooks.flow import Flow

SOURCE = "optimizer"
MODULE = "torch.optim.optimizer"
# Steps of other optimizers without one of the clock's after which the clock is taken over.
TAKE_OVER_AFTER = 100


class OptimizerHooks:
    """The global hooks before and after ``Optimizer.step``."""

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._clock_optimizer: weakref.ref[Any] | None = None
        self._others = 0
        self._in_optimizer = False

    def before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            flow = self._flow
            if not self._is_clock(optimizer) or flow.attach() is None:
                return
            flow.begin_step(SOURCE)
            if self._in_optimizer:
                # The step before raised: no hook saw its end.
                self._in_optimizer = False
                flow.leave("optimizer")
            # With a closure, forward and backward run inside optimizer.step().
            if len(args) < 2 and not kwargs.get("closure"):
                flow.enter("optimizer")
                self._in_optimizer = True
        except Exception as error:
            faults.swallow(error)

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            flow = self._flow
            if flow.monitor is None or not self._is_clock(optimizer):
                return
            if self._in_optimizer:
                self._in_optimizer = False
                flow.leave("optimizer")
            flow.end_step(SOURCE)
        except Exception as error:
            faults.swallow(error)

    def _is_clock(self, optimizer: Any) -> bool:
        """Several optimizers may step in one step of the training: one of them is its clock."""
        clock = self._clock_optimizer() if self._clock_optimizer is not None else None
        if clock is optimizer:
            self._others = 0
            return True
        self._others += clock is not None
        if clock is not None and self._others < TAKE_OVER_AFTER:
            return False
        self._clock_optimizer = weakref.ref(optimizer)
        self._others = 0
        return True


def install(module: ModuleType, flow: Flow) -> None:
    hooks = OptimizerHooks(flow)
    module.register_optimizer_step_pre_hook(hooks.before)
    module.register_optimizer_step_post_hook(hooks.after)
