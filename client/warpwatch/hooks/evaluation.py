"""Where nothing is loaded: ``eval()`` between two steps begins an evaluation, ``generate`` is one.

Images, texts and scores that a program makes of its model now and then come from no DataLoader, and
calls of the model are not looked at where there is one (see modules). Neither hook runs in a step.
"""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from warpwatch import faults
from warpwatch.hooks.hook_state import HookState

MODULE = "torch"
GENERATION = "transformers.generation.utils"
# Steps from one evaluation to the next: a part of the model is put into eval() at every one.
APART = 2


class EvalHook:
    """``Module.eval``. steps: those that were counted when it was called last."""

    __slots__ = ("_state", "_steps")

    def __init__(self, state: HookState) -> None:
        self._state = state
        self._steps = -APART

    @faults.guarded
    def called(self) -> None:
        """Up to the next batch of training data, backward or end of a step."""
        state = self._state
        if state.evaluating or not state.batches or not state.in_training_thread():
            return
        # Of a batch that no backward has used yet: it may be a teacher's.
        if state.samples or state.tokens or state.in_backward or state.monitor is None:
            return
        before, self._steps = self._steps, state.monitor.clock.steps
        if self._steps - before >= APART:
            state.switch("eval")


def install(module: ModuleType, state: HookState) -> None:
    hook = EvalHook(state)
    modules = module.nn.Module
    original = modules.eval

    @wraps(original)
    def eval(self: Any) -> Any:
        if not (state.compiles and state.is_compiling()):
            hook.called()
        return original(self)

    modules.eval = eval


def install_generation(module: ModuleType, state: HookState) -> None:
    """A model that generates in training mode makes its own data (GRPO)."""
    mixin = module.GenerationMixin
    original = mixin.generate

    @wraps(original)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        monitor = state.monitor
        if monitor is None:
            return original(model, *args, **kwargs)
        with monitor.phase("rollout" if getattr(model, "training", False) else "eval"):
            return original(model, *args, **kwargs)

    mixin.generate = generate
