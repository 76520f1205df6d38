"""Saving is the phase ``checkpoint``: torch.save, and the calls of torch.distributed.checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import ModuleType
from typing import Any

from warpwatch.hooks.hook_state import HookState

MODULE = "torch"
DISTRIBUTED_PACKAGE = "torch.distributed.checkpoint"
DISTRIBUTED_MODULE = f"{DISTRIBUTED_PACKAGE}.state_dict_saver"


def install(module: ModuleType, state: HookState) -> None:
    _replace("save", state, module.serialization, module)


def install_distributed(module: ModuleType, state: HookState) -> None:
    """``async_save`` is the call only: what its threads write delays no one."""
    package = sys.modules.get(DISTRIBUTED_PACKAGE)
    for name in ("save", "async_save"):
        _replace(name, state, module, package)


def _replace(name: str, state: HookState, *modules: ModuleType | None) -> None:
    """The function of the first module, under its name in all of them."""
    original = getattr(modules[0], name, None)
    if original is None:
        return
    saving = _saving(original, state)
    for module in modules:
        if getattr(module, name, None) is original:
            setattr(module, name, saving)


def _saving(original: Callable[..., Any], state: HookState) -> Callable[..., Any]:
    @wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        monitor = state.monitor
        if monitor is None or state.is_compiling():
            return original(*args, **kwargs)
        with monitor.phase("checkpoint"), _in_the_trace():
            return original(*args, **kwargs)

    return save


def _in_the_trace() -> AbstractContextManager[Any]:
    """While a profiler records: an annotation, as torch has no event for a save."""
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    enabled: Any = getattr(sys.modules.get("torch.autograd"), "_profiler_enabled", None)
    if profiler is None or enabled is None or not enabled():
        return nullcontext()
    annotation: AbstractContextManager[Any] = profiler.record_function("checkpoint")
    return annotation
