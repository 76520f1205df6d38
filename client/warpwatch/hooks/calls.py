"""Hooks torch's communication, which is the phase ``comm``, and its saving, ``checkpoint``.

Blocking collectives and point-to-point calls are wrapped. Asynchronous ones return at once, so
their ``wait`` is wrapped instead. A module is hooked when its import ends, before other modules
import names from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any

from warpwatch.hooks.hook_state import HookState

MODULE = "torch.distributed.distributed_c10d"
FUNCTIONAL_MODULE = "torch.distributed._functional_collectives"
PHASE = "comm"

BLOCKING = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object",
    "all_gather_single", "all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single",
    "barrier", "batch_isend_irecv", "broadcast", "broadcast_object_list", "gather", "gather_object",
    "monitored_barrier", "recv", "recv_object_list", "reduce", "reduce_scatter",
    "reduce_scatter_single", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send",
    "send_object_list",
)  # fmt: skip


def install(module: ModuleType, state: HookState) -> None:
    wrappers: dict[Any, Any] = {}
    for name in BLOCKING:
        original = getattr(module, name, None)
        if original is not None:
            if original not in wrappers:
                wrappers[original] = _timed(original, state)
            setattr(module, name, wrappers[original])
    _replace_elsewhere(wrappers)
    work = getattr(module, "Work", None)
    if work is not None:
        work.wait = _timed_wait(work.wait, state)


def install_functional(module: ModuleType, state: HookState) -> None:
    """Time the wait for the result of a functional collective in eager mode."""
    module.wait_tensor = _timed(module.wait_tensor, state)  # type: ignore[attr-defined]


def _timed(original: Callable[..., Any], state: HookState) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        if state.is_compiling():
            return original(*args, **kwargs)
        monitor = state.monitor
        if monitor is None or kwargs.get("async_op"):
            return original(*args, **kwargs)
        with monitor.phase(PHASE):
            return original(*args, **kwargs)

    return call


def _timed_wait(original: Callable[..., Any], state: HookState) -> Callable[..., Any]:
    # The wrapper must be named ``wait`` and have ``self`` first: by these two pybind11 detects that
    # a Python subclass calls its base. Else a subclass without its own ``wait`` recurses for ever.
    @wraps(original)
    def wait(self: Any, *args: Any, **kwargs: Any) -> Any:
        monitor = state.monitor
        if monitor is None:
            return original(self, *args, **kwargs)
        with monitor.phase(PHASE):
            return original(self, *args, **kwargs)

    return wait


def _replace_elsewhere(wrappers: dict[Any, Any]) -> None:
    """Replace the originals under torch's other names, if they were imported before."""
    for name in ("torch.distributed", FUNCTIONAL_MODULE):
        names = vars(sys.modules[name]) if name in sys.modules else {}
        for key, value in list(names.items()):
            # isinstance would read __class__, and torch's deprecated objects then warn.
            if type(value) is FunctionType and value in wrappers:
                names[key] = wrappers[value]
    # Dynamo's table maps a collective to its functional form.
    twins = getattr(sys.modules.get(FUNCTIONAL_MODULE), "traceable_collective_remaps", {})
    for original, wrapper in wrappers.items():
        if original in twins:
            twins[wrapper] = twins[original]


SAVING_MODULE = "torch"
DISTRIBUTED_SAVING = "torch.distributed.checkpoint"
DISTRIBUTED_SAVING_MODULE = f"{DISTRIBUTED_SAVING}.state_dict_saver"


def install_saving(module: ModuleType, state: HookState) -> None:
    _time_saving("save", state, module.serialization, module)


def install_distributed_saving(module: ModuleType, state: HookState) -> None:
    """Time the calls; the writing threads of ``async_save`` do not delay the training."""
    package = sys.modules.get(DISTRIBUTED_SAVING)
    for name in ("save", "async_save"):
        _time_saving(name, state, module, package)


def _time_saving(name: str, state: HookState, *modules: ModuleType | None) -> None:
    """Wrap the first module's function of this name, in all modules that have it."""
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
        with monitor.phase("checkpoint"), _annotation():
            return original(*args, **kwargs)

    return save


def _annotation() -> AbstractContextManager[Any]:
    """Return an annotation for the trace if a profiler records: torch has no event for a save."""
    profiler: Any = sys.modules.get("torch.autograd.profiler")
    enabled: Any = getattr(sys.modules.get("torch.autograd"), "_profiler_enabled", None)
    if profiler is None or enabled is None or not enabled():
        return nullcontext()
    annotation: AbstractContextManager[Any] = profiler.record_function("checkpoint")
    return annotation
