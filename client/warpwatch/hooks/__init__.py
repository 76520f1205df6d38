"""Steps and phases without a change to the code: hooks, once the program imports what they hook.

- watcher: calls back when a module has been imported
- hook_state: what the hooks know together: who sets the step clock, the phase between calls
- optimizer, dataloader, …: one file a hook; each names its module and has ``install``
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import NamedTuple, Protocol

from warpwatch.hooks import (
    backward,
    checkpoint,
    dataloader,
    ddp,
    distributed,
    dynamo,
    evaluation,
    frameworks,
    modules,
    optimizer,
    profiler,
)
from warpwatch.hooks.hook_state import HookState
from warpwatch.hooks.watcher import Watcher


class Install(Protocol):
    def __call__(self, module: ModuleType, state: HookState) -> None: ...


class Hook(NamedTuple):
    """``name`` switches it in WARPWATCH_HOOKS; installed when ``module`` has been imported."""

    name: str
    module: str
    install: Install


HOOKS = (
    Hook("optimizer", optimizer.MODULE, optimizer.install),
    *(Hook("optimizer", module, optimizer.install_scaler) for module in optimizer.SCALER_MODULES),
    Hook("optimizer", "torch", optimizer.install_zero_grad),
    *(Hook("optimizer", module, optimizer.install_other) for module in optimizer.OTHERS),
    Hook("optimizer", dynamo.MODULE, dynamo.install),
    Hook("dataloader", dataloader.MODULE, dataloader.install),
    Hook("backward", backward.MODULE, backward.install),
    Hook("backward", backward.DISTRIBUTED_MODULE, backward.install_distributed),
    Hook("modules", modules.MODULE, modules.install),
    Hook("modules", dynamo.MODULE, modules.install_compiled),
    Hook("modules", evaluation.MODULE, evaluation.install),
    Hook("comm", distributed.MODULE, distributed.install),
    Hook("comm", distributed.FUNCTIONAL_MODULE, distributed.install_functional),
    Hook("ddp", ddp.MODULE, ddp.install),
    Hook("checkpoint", checkpoint.MODULE, checkpoint.install),
    Hook("checkpoint", checkpoint.DISTRIBUTED_MODULE, checkpoint.install_distributed),
    Hook("profiler", profiler.MODULE, profiler.install),
    Hook("transformers", frameworks.TRANSFORMERS, frameworks.install_transformers),
    Hook("transformers", evaluation.GENERATION, evaluation.install_generation),
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
    """Hook what WARPWATCH_HOOKS names (all by default), now or once the program imports it.

    The first call of the process decides; every call returns the same state. Never raises.
    """
    global _state
    if _state is not None:
        return _state
    _state = state = HookState()
    if environ.get("WARPWATCH") == "0":
        state.off = True
        return state
    watcher = Watcher()
    watcher.want("torch", state.torch_imported)
    watcher.want(dynamo.MODULE, state.dynamo_imported)
    names = environ.get("WARPWATCH_HOOKS", ",".join(hook.name for hook in HOOKS)).split(",")
    for hook in HOOKS:
        if hook.name in names:
            watcher.want(hook.module, partial(hook.install, state=state))
    os.register_at_fork(after_in_child=state.drop)
    watcher.install()
    return state
