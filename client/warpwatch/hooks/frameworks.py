"""Hooks Lightning, Hugging Face, Accelerate, DeepSpeed and pipelines at their import.

A trainer with events gets the callback of its integration when training starts, unless it has one.
For other libraries optimizers, engines and methods that are a phase are wrapped.
"""

from __future__ import annotations

import functools
import importlib
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any

from warpwatch import faults, model
from warpwatch.hooks.hook_state import ClockChoice, HookState

TRANSFORMERS = "transformers.trainer"
GENERATION = "transformers.generation.utils"
LIGHTNING = "lightning.pytorch.trainer.trainer"
PYTORCH_LIGHTNING = "pytorch_lightning.trainer.trainer"
ACCELERATE = "accelerate.accelerator"
DEEPSPEED = "deepspeed.runtime.engine"
PIPELINING = "torch.distributed.pipelining.stage"


def install_transformers(module: ModuleType, state: HookState) -> None:
    def add(handler: Any, *args: Any) -> None:
        if not _has_callback("transformers", handler.callbacks):
            handler.callbacks.append(_callback_class("transformers")())

    _before(module.CallbackHandler, "on_train_begin", add)
    # No event says that a training failed or was interrupted.
    _after(module.Trainer, "train", lambda *_: state.end_training("transformers"))
    _evaluation(module.Trainer, "evaluate", state)
    _phase(module.Trainer, "_save_checkpoint", "checkpoint", state)


def install_generation(module: ModuleType, state: HookState) -> None:
    """Time ``generate``; in training mode the model makes its own data (GRPO)."""

    def phase(model: Any, *_: Any, **__: Any) -> AbstractContextManager[Any]:
        name = "rollout" if getattr(model, "training", False) else "eval"
        return state.monitor.phase(name) if state.monitor else nullcontext()

    _inside(module.GenerationMixin, "generate", phase)


def install_lightning(module: ModuleType, state: HookState) -> None:
    def add(trainer: Any, *args: Any, **kwargs: Any) -> None:
        if not _has_callback("lightning", trainer.callbacks):
            # Before those that save: what they do at the end of a step delays the next one.
            trainer.callbacks.insert(0, _callback_class("lightning")())

    _before(module.Trainer, "fit", add)
    _evaluation(module._EvaluationLoop, "run", state)
    _phase(module.Trainer, "save_checkpoint", "checkpoint", state)
    _phase(module.Strategy, "batch_to_device", "h2d", state)
    package = module.__name__.rpartition(".trainer.")[0]
    optimizer = sys.modules[f"{package}.core.optimizer"].LightningOptimizer
    # Where there are several, the forward pass for the next one follows.
    _after(optimizer, "step", lambda *_: state.switch("forward"))


def install_accelerate(module: ModuleType, state: HookState) -> None:
    _steps(
        module.AcceleratedOptimizer,
        "step",
        _Steps(state, "accelerate", lambda optimizer: optimizer.gradient_state.sync_gradients),
    )
    _phase(sys.modules["accelerate.data_loader"], "send_to_device", "h2d", state)
    _phase(module.Accelerator, "save_state", "checkpoint", state)


def install_deepspeed(module: ModuleType, state: HookState) -> None:
    # engine.step() and pipelines call it at the boundary of gradient accumulation.
    _steps(module.DeepSpeedEngine, "_take_model_step", _Steps(state, "deepspeed", lambda _: True))
    _phase(module.DeepSpeedEngine, "save_checkpoint", "checkpoint", state)
    # Optimizers are called there to allocate their state, before there are gradients.
    _unseen(module.DeepSpeedEngine, "__init__", state)


def install_pipelining(module: ModuleType, state: HookState) -> None:
    def note(stage: Any, *_: Any) -> None:
        model.note("pp", stage.group_rank, stage.group_size)

    _after(module._PipelineStageBase, "__init__", note)


def _callback_class(integration: str) -> Any:
    """Import the callback, whose base class is the framework's."""
    module = importlib.import_module(f"warpwatch.integrations.{integration}")
    return module.WarpwatchCallback


def _has_callback(integration: str, callbacks: list[Any]) -> bool:
    return any(isinstance(callback, _callback_class(integration)) for callback in callbacks)


def _before(owner: Any, name: str, act: Callable[..., object]) -> None:
    original = getattr(owner, name)
    act = faults.guarded(act)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        act(*args, **kwargs)
        return original(*args, **kwargs)

    setattr(owner, name, call)


def _after(owner: Any, name: str, act: Callable[..., object]) -> None:
    original = getattr(owner, name)
    act = faults.guarded(act)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        finally:
            act(*args)

    setattr(owner, name, call)


def _inside(owner: Any, name: str, context: Callable[..., AbstractContextManager[Any]]) -> None:
    """Run each call inside a new ``context``, which gets the call's arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with context(*args, **kwargs):
            return original(*args, **kwargs)

    setattr(owner, name, call)


def _phase(owner: Any, name: str, phase: str, state: HookState) -> None:
    """Make each call a phase, once the process trains."""
    _inside(
        owner, name, lambda *_, **__: state.monitor.phase(phase) if state.monitor else nullcontext()
    )


def _evaluation(owner: Any, name: str, state: HookState) -> None:
    """Make each call the phase ``eval``; data loaded meanwhile are not for training."""

    @contextmanager
    def evaluating(*_: Any, **__: Any) -> Iterator[None]:
        before, state.evaluating = state.evaluating, True
        try:
            yield
        finally:
            state.evaluating = before

    _phase(owner, name, "eval", state)
    _inside(owner, name, evaluating)


def _unseen(owner: Any, name: str, state: HookState) -> None:
    """Ignore backwards and optimizer steps inside the calls: they are not training."""

    @contextmanager
    def off(*_: Any, **__: Any) -> Iterator[None]:
        before = state.off, state.monitor
        state.off, state.monitor = True, None
        try:
            yield
        finally:
            state.off, state.monitor = before

    _inside(owner, name, off)


class _Steps:
    """The calls that update the model; one object's calls are the clock (see ClockChoice)."""

    def __init__(self, state: HookState, source: str, updates: Callable[[Any], bool]) -> None:
        self.state = state
        self._updates = updates
        self._source = source
        self._clock: weakref.ref[Any] | None = None
        self._choice = ClockChoice()

    def update(self, stepper: Any) -> bool:
        """Return whether the call updates the model; False for a library of another form."""
        try:
            return self._updates(stepper)
        except Exception as error:
            faults.swallow(error)
            return False

    @faults.guarded
    def begin(self) -> None:
        self.state.attach()
        self.state.begin_step(self._source)

    @faults.guarded
    def end(self, stepper: Any) -> None:
        current, monitor = self._clock() if self._clock is not None else None, self.state.monitor
        if current is not stepper:
            if monitor is None or not self._choice.takes_over(stepper, current, monitor.clock):
                return
            self._clock = weakref.ref(stepper)
            if self._choice.gives_back:
                return
        self.state.end_step(self._source)


def _steps(owner: Any, name: str, steps: _Steps) -> None:
    """Make each call that updates the model the phase ``optimizer``."""
    original = getattr(owner, name)
    state = steps.state

    @functools.wraps(original)
    def call(stepper: Any, *args: Any, **kwargs: Any) -> Any:
        if state.off or not steps.update(stepper):
            return original(stepper, *args, **kwargs)
        steps.begin()
        monitor = state.monitor
        if monitor is None:
            return original(stepper, *args, **kwargs)
        with monitor.phase("optimizer"):
            result = original(stepper, *args, **kwargs)
        steps.end(stepper)
        return result

    setattr(owner, name, call)
