"""Saving is the phase ``checkpoint``: torch.save, and the calls of torch.distributed.checkpoint."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import ModuleType
from typing import Any

from warpwatch.hooks.hook_state import Flow

MODULE = "torch"
DISTRIBUTED_PACKAGE = "torch.distributed.checkpoint"
DISTRIBUTED_MODULE = f"{DISTRIBUTED_PACKAGE}.state_dict_saver"


def install(module: ModuleType, flow: Flow) -> None:
    _replace("save", flow, module.serialization, module)


def install_distributed(module: ModuleType, flow: Flow) -> None:
    """``async_save`` is the call only: what its threads write holds nobody up."""
    package = sys.modules.get(DISTRIBUTED_PACKAGE)
    for name in ("save", "async_save"):
        _replace(name, flow, module, package)


def _replace(name: str, flow: Flow, *modules: ModuleType | None) -> None:
    """The function of the first module, under its name in all of them."""
    original = getattr(modules[0], name, None)
    if original is None:
        return
    saving = _saving(original, flow)
    for module in modules:
        if getattr(module, name, None) is original:
            setattr(module, name, saving)


def _saving(original: Callable[..., Any], flow: Flow) -> Callable[..., Any]:
    @wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        monitor = flow.monitor
        if monitor is None or flow.is_compiling():
            return original(*args, **kwargs)
        with monitor.phase("checkpoint"), _in_the_trace():
            return original(*args, **kwargs)

    return save


def _in_the_trace() -> AbstractContextManager[Any]:
    """While a profiler records: an annotation, as no event of torch tells of a save."""
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    enabled: Any = getattr(sys.modules.get("torch.autograd"), "_profiler_enabled", None)
    if profiler is None or enabled is None or not enabled():
        return nullcontext()
    annotation: AbstractContextManager[Any] = profiler.record_function("checkpoint")
    return annotation
