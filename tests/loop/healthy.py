"""Healthy trainings that know nothing of Warpwatch, for ``warpwatch run``.

``healthy.py KIND FOLDER``: the ranks meet there, and save there. Each does something that is not a
fault and looks like one: what the steps take, whose they are and whether there are any changes for
a while. Real optimizers, data loaders and gloo, on very little of a processor: a layer sleeps in
place of a GPU's work, a little more for one batch than for another.
"""

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

WIDTH, BATCH = 32, 8
STEP_S = 0.2
# So slow that a hundred steps of the other optimizer take longer than a hang's timeout.
SLOW_STEP_S, TURN_STEPS = 1.6, 120
ACCUMULATED = 4
EVALUATE_STEPS, EVALUATED_BATCHES = 80, 15
SAVE_STEPS, SAVE_BY_HAND_STEPS, SAVE_S = 100, 130, 0.3
SHORT_TOKENS, LONG_TOKENS, LONG_SHARE, TOKEN_S = 128, 512, 0.3, 8e-4
# The steps of each life of a run that restarts again and again.
LIFE_STEPS = 300
# The neighbour computes for so long, after a pause of so long.
BUSY_S, PAUSE_S = (0.2, 0.6), (4.0, 12.0)


class Sequences(IterableDataset[dict[str, torch.Tensor]]):  # type: ignore[misc]
    """Batches of tokens: now short, now long."""

    def __init__(self, rank: int) -> None:
        self._random = random.Random(rank)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            is_long = self._random.random() < LONG_SHARE
            longest = LONG_TOKENS if is_long else SHORT_TOKENS
            tokens = self._random.randint(longest // 2, longest)
            yield {"input_ids": torch.ones(BATCH, tokens, dtype=torch.long)}


class Numbers(IterableDataset[torch.Tensor]):  # type: ignore[misc]
    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield torch.ones(BATCH, WIDTH)


class Network(torch.nn.Module):  # type: ignore[misc]
    """Takes its time as on a GPU."""

    def __init__(self, seconds: float, seed: int) -> None:
        super().__init__()
        self._layer = torch.nn.Linear(WIDTH, WIDTH)
        self._seconds = seconds
        self._random = random.Random(seed)

    def forward(self, x: torch.Tensor, seconds: float | None = None) -> torch.Tensor:
        full_s = self._seconds if seconds is None else seconds
        time.sleep(full_s * self._random.uniform(0.97, 1.03))
        return torch.nn.functional.gelu(self._layer(x))


class Large:
    """Takes its time when it is saved."""

    def __getstate__(self) -> dict[str, int]:
        time.sleep(SAVE_S)
        return {}


class Training:
    def __init__(self, folder: Path, rank: int, size: int) -> None:
        self._folder = folder
        self._rank = rank
        self._size = size

    def _network(self, seconds: float = STEP_S) -> Any:
        network = Network(seconds, self._rank)
        return DistributedDataParallel(network) if self._size > 1 else network

    def _steps(self, seconds: float = STEP_S) -> Iterator[tuple[int, Any]]:
        """An ordinary training: the number of each step that has ended, and the network."""
        network = self._network(seconds)
        optimizer = torch.optim.AdamW(network.parameters())
        for number, batch in enumerate(DataLoader(Numbers(), batch_size=None), 1):
            update(optimizer, network(batch))
            yield number, network

    def noisy_neighbour(self) -> None:
        for _ in self._steps():
            pass

    def accumulation(self) -> None:
        network = self._network(STEP_S / ACCUMULATED)
        optimizer = torch.optim.AdamW(network.parameters())
        for number, batch in enumerate(DataLoader(Numbers(), batch_size=None), 1):
            network.require_backward_grad_sync = number % ACCUMULATED == 0
            (network(batch).square().mean() / ACCUMULATED).backward()
            if number % ACCUMULATED == 0:
                optimizer.step()
                optimizer.zero_grad()

    def evaluation(self) -> None:
        for number, network in self._steps():
            if number % EVALUATE_STEPS == 0:
                network.eval()
                with torch.no_grad():
                    for _ in range(EVALUATED_BATCHES):
                        network.module(torch.ones(BATCH, WIDTH))
                network.train()

    def checkpoints(self) -> None:
        for number, network in self._steps():
            if self._rank == 0 and number % SAVE_STEPS == 0:
                torch.save((network.state_dict(), Large()), self._folder / "model.pt")
            if number % SAVE_BY_HAND_STEPS == 0:
                # As no hook sees it.
                time.sleep(SAVE_S)

    def sequences(self) -> None:
        network = self._network()
        optimizer = torch.optim.AdamW(network.parameters())
        for batch in DataLoader(Sequences(self._rank), batch_size=None):
            tokens = batch["input_ids"].shape[1]
            update(optimizer, network(torch.ones(BATCH, WIDTH), tokens * TOKEN_S))

    def two_optimizers(self) -> None:
        """One trains for a while, then the other; both stay."""
        networks = [self._network(SLOW_STEP_S) for _ in range(2)]
        optimizers = [torch.optim.AdamW(network.parameters()) for network in networks]
        for number, batch in enumerate(DataLoader(Numbers(), batch_size=None)):
            turn = number // TURN_STEPS % 2
            update(optimizers[turn], networks[turn](batch))

    def gan(self) -> None:
        generator, discriminator = self._network(STEP_S / 4), self._network(STEP_S / 4)
        generates = torch.optim.Adam(generator.parameters())
        discriminates = torch.optim.Adam(discriminator.parameters())
        for real in DataLoader(Numbers(), batch_size=None):
            made = generator(torch.randn(BATCH, WIDTH))
            discriminates.zero_grad()
            discriminator(real).square().mean().backward()
            discriminator(made.detach()).square().mean().backward()
            discriminates.step()
            update(generates, discriminator(made))

    def restarts(self) -> None:
        """Ends in order, to be started again."""
        for number, _ in self._steps():
            if number == LIFE_STEPS:
                return


def update(optimizer: torch.optim.Optimizer, output: torch.Tensor) -> None:
    optimizer.zero_grad()
    output.square().mean().backward()
    optimizer.step()


def neighbour() -> None:
    """No training: another program, that takes a core now and then."""
    chance = random.Random(0)
    while True:
        time.sleep(chance.uniform(*PAUSE_S))
        busy_until = time.perf_counter() + chance.uniform(*BUSY_S)
        while time.perf_counter() < busy_until:
            pass


def main() -> None:
    kind, folder = sys.argv[1], Path(sys.argv[2])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    if size > 1:
        meeting = f"file://{folder / 'meeting'}"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    getattr(Training(folder, rank, size), kind)()


if __name__ == "__main__":
    neighbour() if sys.argv[1:] == ["neighbour"] else main()
