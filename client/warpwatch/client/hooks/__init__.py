"""Steps and phases without a change to the code: hooks, once the program imports what they hook.

- watcher: tells when a module has been imported
- flow: what the hooks know together: who sets the step clock, the phase between calls
- optimizer, dataloader, …: one file a hook; each names its module and has ``install(module, flow)``
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import NamedTuple, Protocol

from warpwatch.client.hooks import dataloader, optimizer
from warpwatch.client.hooks.flow import Flow
from warpwatch.client.hooks.watcher import Watcher


class Install(Protocol):
    def __call__(self, module: ModuleType, flow: Flow) -> None: ...


class Hook(NamedTuple):
    """``name`` switches it in WARPWATCH_HOOKS; installed when ``module`` has been imported."""

    name: str
    module: str
    install: Install


HOOKS = (
    Hook("optimizer", optimizer.MODULE, optimizer.install),
    Hook("dataloader", dataloader.MODULE, dataloader.install),
)


def install(environ: Mapping[str, str] = os.environ) -> None:
    """Hook what WARPWATCH_HOOKS names (all by default), now or once the program imports it."""
    if environ.get("WARPWATCH") == "0":
        return
    flow, watcher = Flow(), Watcher()
    names = environ.get("WARPWATCH_HOOKS", ",".join(hook.name for hook in HOOKS)).split(",")
    for hook in HOOKS:
        if hook.name in names:
            watcher.want(hook.module, partial(hook.install, flow=flow))
    os.register_at_fork(after_in_child=flow.drop)
    watcher.install()
