"""A training on the GPU, watched through the shim, into which faults are injected.

    python -m benchmarks.gpu.training JOB SWITCH DEVICE

Reads from the file SWITCH which fault is on, once a step: ``data_stall``, ``item``, ``pageable``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

import warpwatch
from benchmarks.gpu.networks import TrainedNetwork
from warpwatch_daemon.demo.faults import Switch

STALL_S = 0.05
READ_VALUES = 200
PAGEABLE_BYTES, SMALL_PAGEABLE_BYTES = 512 * 2**20, 2**20


class FaultOfEachStep(IterableDataset):  # type: ignore[misc]
    """Comes late where it is a stall of the data."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def __iter__(self) -> Iterator[str]:
        while True:
            fault = self._switch.get()
            if fault == "data_stall":
                time.sleep(STALL_S)
            yield fault


def main(job: str, switch: str, device: str) -> None:
    network = TrainedNetwork("transformer", "eager", device)
    size = PAGEABLE_BYTES if device == "cuda" else SMALL_PAGEABLE_BYTES
    pageable, host_batch = torch.empty(size, dtype=torch.uint8), network.batch.cpu()
    fault = ""

    def read_back(layer: Any, given: Any, output: torch.Tensor) -> None:
        """Values after every layer one by one, for each of which the CPU waits."""
        for value in output.flatten()[: READ_VALUES if fault == "item" else 0]:
            value.item()

    for layer in network.layers:
        layer.register_forward_hook(read_back)
    monitor = warpwatch.attach(job=job)
    loader = DataLoader(FaultOfEachStep(Switch(Path(switch))), batch_size=None)
    for fault in monitor.wrap(loader):
        with monitor.step(samples=len(network.batch)):
            with monitor.phase("h2d"):
                network.batch = host_batch.to(device, non_blocking=True)
                if fault == "pageable":
                    pageable.to(device)
            for name, work in network.phases.items():
                with monitor.phase(name):
                    work()


if __name__ == "__main__":
    main(*sys.argv[1:])
