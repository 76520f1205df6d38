"""Waiting for the DataLoader is the phase ``data_wait``."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from warpwatch.client.hooks.flow import Flow

SOURCE = "dataloader"
MODULE = "torch.utils.data.dataloader"


def install(module: ModuleType, flow: Flow) -> None:
    iterator = module._BaseDataLoaderIter
    original = iterator.__next__

    def __next__(loader: Any) -> Any:
        monitor = flow.monitor
        if monitor is None:
            return original(loader)
        with monitor.phase("data_wait"):
            return original(loader)

    iterator.__next__ = __next__
