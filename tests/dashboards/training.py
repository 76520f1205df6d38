"""One rank of a small training that tells all that the shim can tell: phases, samples, tokens.

``training.py MEETING``: the ranks meet in that file. DDP over gloo; work is mostly sleep, so that
two busy cores are enough for four ranks. The file ``MEETING.slow`` names the rank that is slow now.
It never ends by itself.
"""

import gc
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import warpwatch
from warpwatch import protocol

JOB = "llama-7b"
VOCABULARY, LENGTH, BATCH = 64, 32, 8
FORWARD_S, BACKWARD_S, SLOW_S = 0.06, 0.09, 0.06
COLLECT_STEPS, MEMORY_STEPS = 25, 5
GIB = 2**30


def main() -> None:
    meeting = Path(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=size)
    train(meeting.with_suffix(".slow"), rank)


def train(slow: Path, rank: int) -> None:
    loader = DataLoader(TensorDataset(torch.randint(VOCABULARY, (100 * BATCH, LENGTH))), BATCH)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, VOCABULARY))
    )
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = warpwatch.attach(job=JOB)
    noise = random.Random(rank)
    number = 0
    while True:
        for (ids,) in monitor.wrap(loader):
            number += 1
            with monitor.step(samples=len(ids), tokens=ids.numel()):
                is_slow = slow.exists() and slow.read_text() == str(rank)
                step(monitor, model, optimizer, ids, noise.uniform(0.95, 1.05), is_slow)
            if number % COLLECT_STEPS == 0:
                gc.collect(0)
            if number % MEMORY_STEPS == 0:
                tell_memory(monitor)


def step(
    monitor: warpwatch.Monitor,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    factor: float,
    slow: bool,
) -> None:
    with monitor.phase("forward"):
        time.sleep(FORWARD_S * factor + (SLOW_S if slow else 0.0))
        logits = model(ids[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    with monitor.phase("comm"):
        dist.all_reduce(loss.detach().clone())
    with monitor.phase("backward"):
        time.sleep(BACKWARD_S * factor)
        loss.backward()
    with monitor.phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


def tell_memory(monitor: warpwatch.Monitor) -> None:
    """As a rank with a GPU does, whose allocator a CPU does not have."""
    ring = monitor.clock.ring
    if ring is not None:
        words = (40 * GIB, 60 * GIB, 52 * GIB, 0, 0, 3 * GIB)
        ring.append(protocol.RECORD_MEMORY, protocol.MEMORY.pack(*words))


if __name__ == "__main__":
    main()
