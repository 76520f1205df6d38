"""A training that knows nothing of Warpwatch, for ``warpwatch run``: four ranks, DDP over gloo.

``training.py FOLDER``: the ranks meet there, and rank 0 saves there. The file ``fault`` in it tells
what goes wrong from now on, a line each: a name and the ranks that have it (``slow_forward 1``). It
never ends by itself. Work is mostly sleep, so that two busy cores are enough for four ranks.
"""

import gc
import os
import pickle
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FEATURES, BATCH, SAMPLES = 64, 8, 50_000
LAYERS = 3
LAYER_S = 0.025
COLLATE_S = 0.001
SLOW_COLLATE_S = 0.040
SLOW_FORWARD_S = {"slow_forward": 0.020, "slower_forward": 0.060}
METRICS_S = 0.040
COMPUTE_S = 0.020
LEAKED_FLOATS = 100_000
COLLECT_STEPS = 30
STUCK_POLL_S = 0.2
HEAP_OBJECTS = 1_000_000
# In health: what the ranks do now and then. Saved by torch.save; by hand, which no hook sees.
EVALUATE_STEPS, EVALUATED_BATCHES = 60, 4
SAVE_STEPS, SAVE_BY_HAND_STEPS, SAVE_S = 150, 100, 0.2
LOG_STEPS = 10


class Faults:
    """The faults of this rank, read from the file at each step."""

    def __init__(self, path: Path, rank: int) -> None:
        self._path = path
        self._rank = str(rank)
        self.names: set[str] = set()

    def look(self) -> None:
        lines = [line.split() for line in self._path.read_text().splitlines()]
        self.names = {name for name, *ranks in lines if self._rank in ranks}


class Numbers(Dataset[torch.Tensor]):  # type: ignore[misc]
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((FEATURES,), index / SAMPLES)


class Collate:
    def __init__(self, faults: Faults) -> None:
        self._faults = faults

    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        time.sleep(SLOW_COLLATE_S if "slow_collate" in self._faults.names else COLLATE_S)
        return torch.stack(samples)


class Layer(torch.nn.Module):  # type: ignore[misc]
    """Takes its time as a large one does: a little more for one batch than for another."""

    def __init__(self, faults: Faults, seed: int) -> None:
        super().__init__()
        self._linear = torch.nn.Linear(FEATURES, FEATURES)
        self._faults = faults
        self._random = random.Random(seed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        slow_s = sum(SLOW_FORWARD_S.get(name, 0.0) for name in self._faults.names) / LAYERS
        time.sleep(LAYER_S * self._random.uniform(0.95, 1.05) + slow_s)
        return torch.nn.functional.gelu(self._linear(x))


class Training:
    def __init__(self, folder: Path, rank: int) -> None:
        self._folder = folder
        self._rank = rank
        self._faults = Faults(folder / "fault", rank)
        collate = Collate(self._faults)
        self._data = DataLoader(Numbers(), batch_size=BATCH, collate_fn=collate)
        layers = [Layer(self._faults, LAYERS * rank + number) for number in range(LAYERS)]
        self._model = DistributedDataParallel(
            torch.nn.Sequential(*layers, torch.nn.Linear(FEATURES, 1))
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        self._leaked: list[torch.Tensor] = []
        self._heap = [[number] for number in range(HEAP_OBJECTS)]

    def run(self) -> None:
        number = 0
        while True:
            for batch in self._data:
                number += 1
                self._step(number, batch)
                self._now_and_then(number)

    def _step(self, number: int, batch: torch.Tensor) -> None:
        self._faults.look()
        output = self._model(batch)
        loss = output.square().mean()
        loss.backward()
        self._go_wrong(number, output)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if number % LOG_STEPS == 0:
            print(f"step {number}: {loss.item():.4f}", flush=True)

    def _go_wrong(self, number: int, output: torch.Tensor) -> None:
        names = self._faults.names
        if "metrics" in names:
            deadline = time.perf_counter() + METRICS_S
            while time.perf_counter() < deadline:
                sum(value.item() for value in output)
        if "compute" in names:
            deadline = time.thread_time() + COMPUTE_S
            while time.thread_time() < deadline:
                pass
        if "collect" in names and number % COLLECT_STEPS == 0:
            gc.collect()
        if "leak" in names:
            self._leaked.append(torch.zeros(LEAKED_FLOATS))
        else:
            self._leaked.clear()
        while "stuck" in self._faults.names:
            time.sleep(STUCK_POLL_S)
            self._faults.look()
        if "exception" in names:
            raise ValueError("a label is out of range")

    def _now_and_then(self, number: int) -> None:
        if number % EVALUATE_STEPS == 0:
            self._evaluate()
        if self._rank == 0 and number % SAVE_STEPS == 0:
            torch.save(self._model.state_dict(), self._folder / "model.pt")
        if number % SAVE_BY_HAND_STEPS == 0:
            if self._rank == 0:
                time.sleep(SAVE_S)
                with (self._folder / "model.pickle").open("wb") as file:
                    pickle.dump([p.tolist() for p in self._model.parameters()], file)
            dist.barrier()

    def _evaluate(self) -> None:
        self._model.eval()
        with torch.no_grad():
            for number, batch in enumerate(self._data):
                if number == EVALUATED_BATCHES:
                    break
                self._model.module(batch)
        self._model.train()


def main() -> None:
    folder = Path(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size)
    Training(folder, rank).run()


if __name__ == "__main__":
    main()
