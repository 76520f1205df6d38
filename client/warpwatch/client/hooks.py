"""Steps and data waiting without a change to the code: hooks into torch, once it is imported.

The post hook of the first optimizer seen ends a step and begins the next; the DataLoader's
iteration is data_wait. Nothing is imported here that the program does not import.
"""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from warpwatch.client import faults
from warpwatch.client.attach import attach
from warpwatch.client.monitor import Monitor

OPTIMIZER = "torch.optim.optimizer"
DATALOADER = "torch.utils.data.dataloader"
# Steps of other optimizers without one of the clock's after which the clock is taken over.
TAKE_OVER_AFTER = 100


class Hooks:
    """What the hooks know. There is no monitor before the first optimizer step."""

    def __init__(self) -> None:
        self.monitor: Monitor | None = None
        self.off = False
        self._clock_optimizer: weakref.ref[Any] | None = None
        self._others = 0
        self._in_optimizer = False

    def install_optimizer(self, module: ModuleType) -> None:
        module.register_optimizer_step_pre_hook(self._before_optimizer)
        module.register_optimizer_step_post_hook(self._after_optimizer)

    def install_dataloader(self, module: ModuleType) -> None:
        iterator = module._BaseDataLoaderIter
        original = iterator.__next__

        def __next__(loader: Any) -> Any:
            monitor = self.monitor
            if monitor is None:
                return original(loader)
            with monitor.phase("data_wait"):
                return original(loader)

        iterator.__next__ = __next__

    def drop(self) -> None:
        """In a forked child."""
        self.off = True
        self.monitor = None

    def _before_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            if self.off or not self._is_clock(optimizer):
                return
            if self.monitor is None:
                self.monitor = monitor = attach()
                # A monitor whose user has begun steps is left alone.
                if not monitor.clock.begun:
                    monitor.step_clock = "optimizer"
            if self._leads() and not self.monitor.clock.open:
                self.monitor.clock.begin()
            if self._in_optimizer:
                # The step before raised: no hook saw its end.
                self._in_optimizer = False
                self.monitor.phase("optimizer").__exit__(None, None, None)
            # With a closure, forward and backward run inside optimizer.step().
            if len(args) < 2 and not kwargs.get("closure"):
                self.monitor.phase("optimizer").__enter__()
                self._in_optimizer = True
        except Exception as error:
            faults.swallow(error)

    def _after_optimizer(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            monitor = self.monitor
            if self.off or monitor is None or not self._is_clock(optimizer):
                return
            if self._in_optimizer:
                self._in_optimizer = False
                monitor.phase("optimizer").__exit__(None, None, None)
            if self._leads():
                monitor.clock.end()
                monitor.clock.begin()
        except Exception as error:
            faults.swallow(error)

    def _leads(self) -> bool:
        return self.monitor is not None and self.monitor.step_clock == "optimizer"

    def _is_clock(self, optimizer: Any) -> bool:
        """Several optimizers may step in one step of the training: one of them is its clock."""
        clock = self._clock_optimizer() if self._clock_optimizer is not None else None
        if clock is optimizer:
            self._others = 0
            return True
        self._others += clock is not None
        if clock is not None and self._others < TAKE_OVER_AFTER:
            return False
        self._clock_optimizer = weakref.ref(optimizer)
        self._others = 0
        return True


class Watcher:
    """A finder that finds nothing itself: it calls back when a module has been imported."""

    def __init__(self, wanted: dict[str, Callable[[ModuleType], None]]) -> None:
        self._wanted = wanted

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
        try:
            self._wanted.pop(name)(module)
            if not self._wanted and self in sys.meta_path:
                sys.meta_path.remove(self)
        except Exception as error:
            faults.swallow(error)


def install(environ: Mapping[str, str] = os.environ) -> None:
    """Hook what WARPWATCH_HOOKS names (``optimizer,dataloader``) once the program imports it."""
    if environ.get("WARPWATCH") == "0":
        return
    hooks = Hooks()
    kinds = {
        "optimizer": (OPTIMIZER, hooks.install_optimizer),
        "dataloader": (DATALOADER, hooks.install_dataloader),
    }
    named = environ.get("WARPWATCH_HOOKS", "optimizer,dataloader").split(",")
    os.register_at_fork(after_in_child=hooks.drop)
    Watcher(dict(kinds[name] for name in named if name in kinds)).install()
