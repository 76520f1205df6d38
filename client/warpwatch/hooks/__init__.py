"""Hooks that report steps and phases without a change to the code, installed at imports.

- hook_state: the shared state: the source of the step clock, the phase between calls
- import_watcher: calls back at imports; serving: a process of an inference server
- optimizer, dataloader, …: the hooks; each names its module and has ``install``
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import NamedTuple

from warpwatch.captures import program_profiler
from warpwatch.hooks import backward, calls, dataloader, frameworks, modules, optimizer
from warpwatch.hooks.hook_state import HookState
from warpwatch.hooks.import_watcher import ImportWatcher


def _watch_profiler(module: ModuleType, state: HookState) -> None:
    program_profiler.watch(module)


def _watch_vllm(module: ModuleType, state: HookState) -> None:
    # A training does not import it.
    from warpwatch.hooks import vllm

    vllm.watch_plugins()


def _watch_sglang(module: ModuleType, state: HookState) -> None:
    from warpwatch.hooks import sglang

    sglang.watch_plugins()


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
    Hook("vllm", "vllm.plugins", _watch_vllm),
    Hook("sglang", "sglang.srt.plugins", _watch_sglang),
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
