"""Records small trainings of two ranks over gloo with one fault each: ``recorded_faults.py FOLDER
--ranks``. Every rank computes on a core of its own.
"""

import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.diagnosis.recorded_faults import Training, record, reduce, steps_us

SIZE, CULPRIT = 2, 1
FAULTS = ("healthy", "more_work", "shared_core", "slow_network")
MODELS = ("perceptron", "convolutional")
# The gradients of a large model: 256 MB over the loopback of one machine.
GRADIENTS = 64_000_000
# Longer than any step of the other rank, also on a machine that is busy with other work.
SLEEP_S = 0.3
# Programs that share the culprit's core; recordings of which the least disturbed one is kept.
NEIGHBOURS, ROUNDS = 2, 3


class RankTraining(Training):
    """One rank of a training whose last rank has more work, sleeps, or shares its core."""

    def __init__(self, fault: str, model_name: str, rank: int, scale: float = 1.0) -> None:
        super().__init__(fault, model_name, scale)
        self.rank = rank
        self.forward = DistributedDataParallel(self.model)
        self.gradients = torch.zeros(GRADIENTS if fault == "slow_network" else 1)

    def step(self, number: int, given: Any, labels: Any) -> None:
        if self.fault == "more_work" and self.rank == CULPRIT:
            for _ in range(3):
                self.model(given).sum().backward()
            self.optimizer.zero_grad()
        if self.fault == "sleeping" and self.rank == CULPRIT:
            time.sleep(SLEEP_S)
        super().step(number, given, labels)
        dist.all_reduce(self.gradients)


def record_ranks(folder: Path, fault: str, model: str, steps: int) -> None:
    """Files ``<fault>-<model>.rank<k>.pt.trace.json.gz``, each with the last ``steps``."""
    names = [f"{fault}-{model}.rank{rank}.pt.trace.json.gz" for rank in range(SIZE)]
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as place:
            new = [Path(place) / name for name in names]
            _record(new, f"file://{place}/meeting", fault, model)
            for path in new:
                reduce(path, steps)
            if not (folder / names[0]).exists() or steps_us(new[0]) < steps_us(folder / names[0]):
                for path in new:
                    shutil.copy(path, folder)


def _record(paths: list[Path], meeting: str, fault: str, model: str) -> None:
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_train, args=(rank, meeting, path, fault, model))
        for rank, path in enumerate(paths)
    ]
    count = NEIGHBOURS if fault == "shared_core" else 0
    neighbours = [context.Process(target=_compute) for _ in range(count)]
    for process in (*neighbours, *ranks):
        process.start()
    for process in ranks:
        process.join()
    for process in neighbours:
        process.kill()


def _train(rank: int, meeting: str, path: Path, fault: str, model: str) -> None:
    _use_core_of(rank)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", meeting, rank=rank, world_size=SIZE)
    record(RankTraining(fault, model, rank), path, stacks=False)
    dist.destroy_process_group()


def _compute() -> None:
    """Another program, on the culprit's core."""
    _use_core_of(CULPRIT)
    while True:
        pass


def _use_core_of(rank: int) -> None:
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
