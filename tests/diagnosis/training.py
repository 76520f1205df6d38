"""A rank of a small gloo training that records its own steps: ``training.py RANK FOLDER FAULT``."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

FEATURES = 384
BATCH = 16
ACTIVE_STEPS = 5


class Samples(Dataset):  # type: ignore[misc]
    def __init__(self, sleep_s: float) -> None:
        self._sleep_s = sleep_s
        self._data = torch.randn(4096, FEATURES)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        return self._data[index]


def host_work(fault: str, rank: int) -> None:
    if fault == "host" or (fault == "slow_rank" and rank == 1):
        time.sleep(0.05)
    if fault == "tiny_operators":
        value = torch.zeros(4)
        for _ in range(5000):
            value = value + 1


def record(rank: int, folder: Path, fault: str) -> None:
    layers = [torch.nn.Linear(FEATURES, FEATURES) for _ in range(4)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Samples(0.003 if fault == "loader" else 0.0), batch_size=BATCH)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=ACTIVE_STEPS, repeat=1)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, schedule=schedule) as profiler:
        for _, batch in zip(range(ACTIVE_STEPS + 2), loader, strict=False):
            loss = model(batch.repeat(64 if fault == "compute" else 4, 1)).square().mean()
            host_work(fault, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profiler.export_chrome_trace(str(folder / f"rank{rank}.pt.trace.json.gz"))


def main(rank: int, world_size: int, folder: Path, faults: list[str]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    for fault in faults:
        (folder / fault).mkdir(exist_ok=True)
        dist.barrier()
        record(rank, folder / fault, fault)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
