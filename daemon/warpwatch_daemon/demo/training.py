"""One rank of the demo: a small model, DDP over gloo on the CPU, watched through the shim.

The faults are what goes wrong in real programs: slow samples, Python in the forward pass,
per-parameter checks, a lock that no one releases.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import warpwatch
from warpwatch_daemon.demo.processes import CULPRIT, NONE, Switch

BATCH = 16
FEATURES = 512
LAYERS = 6
# At least, and twice a step a batch: on a busy machine the rest of the step takes longer, too.
SLOW_SAMPLE_S = 0.005
SLOW_STEPS = 2.0
# A rank of the job: they share the cores of one machine, and steps take longer with more.
SLOW_FORWARD_S = 0.040
# A core's time: on a busy machine the rest of the step takes longer, too.
CHECK_S = 0.090
CHECK_PARAMETER_S = 0.0005


class RandomVectors(Dataset):  # type: ignore[misc]
    """Random vectors; under ``data_stall`` each takes as long as a read from a slow disk.

    steps_s: durations of the last healthy steps.
    """

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        self.steps_s: deque[float] = deque(maxlen=9)
        self._data = torch.randn(4096, FEATURES)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> torch.Tensor:
        if self._switch.get() == "data_stall":
            step_s = median(self.steps_s) if self.steps_s else 0.0
            time.sleep(max(SLOW_SAMPLE_S, SLOW_STEPS * step_s / BATCH))
        return self._data[index]


def make_model() -> torch.nn.Module:
    torch.manual_seed(7)
    layers: list[torch.nn.Module] = []
    for _ in range(LAYERS):
        layers += [torch.nn.Linear(FEATURES, FEATURES), torch.nn.GELU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(FEATURES, 1))


def train(switch: Switch, rank: int, steps: int, stop: Path) -> None:
    model = DistributedDataParallel(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = RandomVectors(switch)
    loader = DataLoader(data, batch_size=BATCH)
    monitor = warpwatch.attach(job=os.environ.get("WARPWATCH_JOB", "demo"))
    done = 0
    while done < steps:
        for batch in monitor.wrap(loader):
            fault, begun = switch.get(), time.monotonic()
            with monitor.step(samples=len(batch)):
                one_step(monitor, model, optimizer, batch, fault, rank)
            if fault == NONE:
                data.steps_s.append(time.monotonic() - begun)
            done += 1
            # All ranks leave after the same step: one that went alone would leave the rest hanging.
            if done >= steps or (done % 10 == 0 and together(stop.exists())):
                return


def together(said: bool) -> bool:
    votes = torch.tensor(float(said))
    dist.all_reduce(votes)
    return bool(votes.item() > 0)


def one_step(
    monitor: warpwatch.Monitor,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    fault: str,
    rank: int,
) -> None:
    with monitor.phase("forward"):
        loss = sum_of_passes(model, batch)
        if rank == CULPRIT and fault == "slow_rank":
            python_work(SLOW_FORWARD_S * dist.get_world_size())
        if rank == CULPRIT and fault == "hang":
            wait_while_hanging()
    with monitor.phase("comm"):
        dist.all_reduce(loss.detach().clone())
    with monitor.phase("backward"):
        loss.backward()
    if fault == "regression":
        check_gradients(model)
    with monitor.phase("optimizer"):
        optimizer.step()
        optimizer.zero_grad()


def sum_of_passes(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = model(batch.repeat(8, 1))
    return output.square().mean()


def check_gradients(model: torch.nn.Module) -> None:
    deadline = time.thread_time() + CHECK_S
    while time.thread_time() < deadline:
        for parameter in model.parameters():
            if parameter.grad is not None:
                float(parameter.grad[0].sum())
                python_work(CHECK_PARAMETER_S)


def python_work(seconds: float) -> int:
    """Use a core for ``seconds`` of its time, as per-sample Python code in a model does."""
    deadline = time.thread_time() + seconds
    rounds = 0
    while time.thread_time() < deadline:
        rounds += 1
    return rounds


def wait_while_hanging() -> None:
    """Wait for a lock that no one releases while the fault is on."""
    switch = Switch(Path(os.environ["WARPWATCH_DEMO_SWITCH"]))
    while switch.get() == "hang":
        time.sleep(0.1)


def main() -> int:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    rendezvous = os.environ["WARPWATCH_DEMO_RENDEZVOUS"]
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
    )
    switch = Switch(Path(os.environ["WARPWATCH_DEMO_SWITCH"]))
    stop = Path(os.environ["WARPWATCH_DEMO_STOP"])
    train(switch, rank, int(os.environ.get("WARPWATCH_DEMO_STEPS", sys.maxsize)), stop)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
