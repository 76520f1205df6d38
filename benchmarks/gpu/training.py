"""A small training on the GPU, watched through the shim, into which faults are injected.

    python -m benchmarks.gpu.training SWITCH STOP DEVICE

Reads from the file SWITCH which fault is on, once a step; ends when the file STOP exists.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import warpwatch
from warpwatch_daemon.demo.faults import NONE, Switch

FAULTS = (NONE, "data_stall", "item", "pageable")
# Data that comes late; reading values back after every layer; copies that nothing hides.
STALL_S = 0.05
PAGEABLE_BYTES, SMALL_PAGEABLE_BYTES = 256 * 2**20, 2**20
WIDTH, BATCH, LAYERS, ROUNDS = 1024, 1024, 8, 4
SMALL_WIDTH, SMALL_BATCH = 128, 64


class Training:
    def __init__(self, device: str) -> None:
        cuda = device == "cuda"
        if not cuda:
            torch.set_num_threads(1)
        width, batch = (WIDTH, BATCH) if cuda else (SMALL_WIDTH, SMALL_BATCH)
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width, device=device) for _ in range(LAYERS)]
        self.layers = torch.nn.ModuleList(layers)
        self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=1e-6)
        self.device = device
        self.samples = torch.randn(batch, width, pin_memory=cuda)
        size = PAGEABLE_BYTES if cuda else SMALL_PAGEABLE_BYTES
        self.pageable = torch.empty(size, dtype=torch.uint8)

    def load(self, switch: Switch) -> Iterator[tuple[str, torch.Tensor]]:
        """The fault that is on, and a batch, for ever."""
        while True:
            fault = switch.get()
            if fault == "data_stall":
                time.sleep(STALL_S)
            yield fault, self.samples

    def step(self, monitor: warpwatch.Monitor, fault: str, samples: torch.Tensor) -> None:
        with monitor.phase("h2d"):
            batch = samples.to(self.device, non_blocking=True)
            if fault == "pageable":
                self.pageable.to(self.device)
        with monitor.phase("forward"):
            loss = self._forward(batch, fault)
        with monitor.phase("backward"):
            loss.backward()
        with monitor.phase("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)

    def _forward(self, batch: torch.Tensor, fault: str) -> torch.Tensor:
        for _ in range(ROUNDS):
            for layer in self.layers:
                batch = torch.nn.functional.gelu(layer(batch))
                if fault == "item":
                    batch.mean().item()
        return batch.square().mean()


def main(switch_file: str, stop_file: str, device: str) -> None:
    switch, stop = Switch(Path(switch_file)), Path(stop_file)
    training = Training(device)
    monitor = warpwatch.attach(job="gpu-check")
    for fault, samples in monitor.wrap(training.load(switch)):
        with monitor.step(samples=len(samples)):
            training.step(monitor, fault, samples)
        if stop.exists():
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
