"""Hooks that report steps and phases without a change to the code, installed at imports.

- hook_state: the shared state: the source of the step clock, the optimizer that is it
- import_watcher: calls back at imports; serving: a process of an inference server
- optimizer, dataloader, …: the hooks; each names its module and has ``install``
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from warpwatch import faults
from warpwatch.captures.profilers import PROFILER_MODULE, watch_program_profiler
from warpwatch.hooks import backward, calls, dataloader, frameworks, modules, optimizer
from warpwatch.hooks.hook_state import HookState
from warpwatch.hooks.import_watcher import ImportWatcher


def _watch_server(module: ModuleType, state: HookState) -> None:
    """Watch the plug-ins of vllm or sglang; a training does not import our hooks of them."""
    import_module(f"warpwatch.hooks.{module.__name__.partition('.')[0]}").watch_plugins()


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
    Hook("profiler", PROFILER_MODULE, lambda module, state: watch_program_profiler(module)),
    Hook("transformers", frameworks.TRANSFORMERS, frameworks.install_transformers),
    Hook("transformers", frameworks.GENERATION, frameworks.install_generation),
    Hook("lightning", frameworks.LIGHTNING, frameworks.install_lightning),
    Hook("lightning", frameworks.PYTORCH_LIGHTNING, frameworks.install_lightning),
    Hook("accelerate", frameworks.ACCELERATE, frameworks.install_accelerate),
    Hook("deepspeed", frameworks.DEEPSPEED, frameworks.install_deepspeed),
    Hook("vllm", "vllm.plugins", _watch_server),
    Hook("sglang", "sglang.srt.plugins", _watch_server),
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
    known = {hook.name for hook in HOOKS}
    names = {name.strip() for name in environ.get("WARPWATCH_HOOKS", ",".join(known)).split(",")}
    for unknown in names - known - {""}:
        faults.swallow(ValueError(f"WARPWATCH_HOOKS: there is no hook {unknown}"))
    for hook in HOOKS:
        if hook.name in names:
            watcher.want(hook.module, partial(hook.install, state=state))
    os.register_at_fork(after_in_child=state.drop)
    watcher.install()
    return state
