"""Hooks that report steps and phases without a change to the code, installed at imports.

- hook_state: the shared state: the source of the step clock, the phase between calls
- optimizer, dataloader, …: the hooks; each names its module and has ``install``
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

from warpwatch import faults
from warpwatch.captures import program_profiler
from warpwatch.hooks import (
    backward,
    calls,
    dataloader,
    frameworks,
    modules,
    optimizer,
)
from warpwatch.hooks.hook_state import HookState


class ImportWatcher:
    """A finder that finds nothing itself: it calls back when a module has been imported."""

    def __init__(self) -> None:
        self._wanted: dict[str, list[Callable[[ModuleType], None]]] = {}

    def want(self, module: str, callback: Callable[[ModuleType], None]) -> None:
        self._wanted.setdefault(module, []).append(callback)

    def install(self) -> None:
        for name in list(self._wanted):
            module = sys.modules.get(name)
            if module is not None:
                self._found(name, module)
        if self._wanted:
            sys.meta_path.insert(0, self)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> Any:
        if name not in self._wanted:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                try:
                    self._watch(name, spec.loader)
                except Exception as error:
                    # A loader that cannot be watched: imported as ever, only not hooked.
                    faults.swallow(error)
                return spec
        return None

    def _watch(self, name: str, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module
            original(module)
            self._found(name, module)

        loader.exec_module = exec_module

    def _found(self, name: str, module: ModuleType) -> None:
        for callback in self._wanted.pop(name, ()):
            try:
                callback(module)
            except Exception as error:
                faults.swallow(error)
        if not self._wanted and self in sys.meta_path:
            sys.meta_path.remove(self)


def _watch_profiler(module: ModuleType, state: HookState) -> None:
    program_profiler.watch(module)


class Hook(NamedTuple):
    """A hook, installed after the import of ``module``; WARPWATCH_HOOKS lists names."""

    name: str
    module: str
    install: Callable[..., None]


HOOKS = (
    Hook("optimizer", optimizer.MODULE, optimizer.install),
    *(Hook("optimizer", module, optimizer.install_scaler) for module in optimizer.SCALER_MODULES),
    Hook("optimizer", "torch", optimizer.install_zero_grad),
    *(Hook("optimizer", module, optimizer.install_other) for module in optimizer.OTHERS),
    Hook("optimizer", optimizer.DYNAMO, optimizer.install_dynamo),
    Hook("dataloader", dataloader.MODULE, dataloader.install),
    Hook("backward", backward.MODULE, backward.install),
    Hook("backward", backward.DISTRIBUTED_MODULE, backward.install_distributed),
    Hook("modules", modules.MODULE, modules.install),
    Hook("modules", optimizer.DYNAMO, modules.install_compiled),
    Hook("modules", modules.MODULE, modules.install_eval),
    Hook("comm", calls.MODULE, calls.install),
    Hook("comm", calls.FUNCTIONAL_MODULE, calls.install_functional),
    Hook("ddp", backward.DDP_MODULE, backward.install_ddp),
    Hook("checkpoint", calls.SAVING_MODULE, calls.install_saving),
    Hook("checkpoint", calls.DISTRIBUTED_SAVING_MODULE, calls.install_distributed_saving),
    Hook("profiler", program_profiler.MODULE, _watch_profiler),
    Hook("transformers", frameworks.TRANSFORMERS, frameworks.install_transformers),
    Hook("transformers", frameworks.GENERATION, frameworks.install_generation),
    Hook("lightning", frameworks.LIGHTNING, frameworks.install_lightning),
    Hook("lightning", frameworks.PYTORCH_LIGHTNING, frameworks.install_lightning),
    Hook("accelerate", frameworks.ACCELERATE, frameworks.install_accelerate),
    Hook("deepspeed", frameworks.DEEPSPEED, frameworks.install_deepspeed),
    Hook("pyro", frameworks.PYRO, frameworks.install_pyro),
    Hook("pyro", frameworks.PYRO_OPTIM, frameworks.install_pyro_optim),
    Hook("pipelining", frameworks.PIPELINING, frameworks.install_pipelining),
)

_state: HookState | None = None


def install(environ: Mapping[str, str] = os.environ) -> HookState:
    """Install the hooks in WARPWATCH_HOOKS (default: all), now or when the program imports them.

    The first call of the process decides; every call returns the same state. Never raises.
    """
    global _state
    if _state is not None:
        return _state
    _state = state = HookState()
    if environ.get("WARPWATCH") == "0":
        state.off = True
        return state
    watcher = ImportWatcher()
    watcher.want("torch", state.torch_imported)
    watcher.want(optimizer.DYNAMO, state.dynamo_imported)
    names = environ.get("WARPWATCH_HOOKS", ",".join(hook.name for hook in HOOKS)).split(",")
    for hook in HOOKS:
        if hook.name in names:
            watcher.want(hook.module, partial(hook.install, state=state))
    os.register_at_fork(after_in_child=state.drop)
    watcher.install()
    return state
