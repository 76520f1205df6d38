"""Lightning: ``Trainer(callbacks=[WarpwatchCallback()])``, of either name of the package."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from warpwatch import hooks
from warpwatch.faults import guarded

SOURCE = "lightning"
PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _callback_class() -> Any:
    """Return the base class of callbacks of the Lightning that the program uses."""
    package = next((name for name in PACKAGES if name in sys.modules), PACKAGES[0])
    return importlib.import_module(package).Callback


class WarpwatchCallback(_callback_class()):  # type: ignore[misc]
    """Optimizer steps of ``Trainer.fit``, several optimizers and accumulated batches as one.

    It holds nothing of this process: a strategy may copy, pickle or spawn with it.
    """

    _global_step = 0

    def __init__(self) -> None:
        super().__init__()
        hooks.install()

    @guarded
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._global_step = trainer.global_step
        hooks.install().begin_training(SOURCE)

    @guarded
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        hooks.install().switch("forward")

    @guarded
    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        # Forward and backward ran inside of optimizer.step(closure); what is left is the update.
        hooks.install().switch("optimizer")

    @guarded
    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._global_step:
            hooks.install().switch("other")
        else:
            self._global_step = trainer.global_step
            hooks.install().end_step(SOURCE)

    @guarded
    def on_train_end(self, trainer: Any, module: Any) -> None:
        hooks.install().end_training(SOURCE)

    @guarded
    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        hooks.install().end_training(SOURCE)
