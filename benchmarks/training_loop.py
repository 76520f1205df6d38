"""A plain PyTorch loop of short steps, by itself or watched by the calls of a peer.

    python benchmarks/training_loop.py VARIANT SOCKET

VARIANT: ``plain`` (also what `warpwatch run` and `traceml run` start), ``shim`` or ``traceml``,
whose calls are then in the loop. After each line with a number on the Unix socket it runs so many
steps and answers with a line of JSON: what a step took and the processor time of the training
thread in it, in microseconds, resident memory in KiB. It ends when the socket is closed.
"""

from __future__ import annotations

import importlib
import itertools
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

BATCH, WIDTH = 32, 64
WARM_UP_STEPS = 200
# They find the processor's caches as others have left them, and do not count.
FIRST_STEPS = 20

Step = Callable[[torch.Tensor], None]


class Batches(torch.utils.data.Dataset):  # type: ignore[misc]
    """One batch again and again: loading costs next to nothing."""

    def __init__(self) -> None:
        self._batch = torch.randn(BATCH, WIDTH)

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._batch


def plain(model: Any, optimizer: Any) -> Step:
    def step(batch: torch.Tensor) -> None:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def shim(model: Any, optimizer: Any) -> Step:
    import warpwatch

    monitor = warpwatch.attach(job="benchmark")

    def step(batch: torch.Tensor) -> None:
        with monitor.step(samples=BATCH):
            with monitor.phase("forward"):
                loss = model(batch).square().mean()
            optimizer.zero_grad()
            with monitor.phase("backward"):
                loss.backward()
            with monitor.phase("optimizer"):
                optimizer.step()

    return step


def traceml(model: Any, optimizer: Any) -> Step:
    """It finds the phases by itself."""
    peer = importlib.import_module("traceml_ai")
    peer.init()

    def step(batch: torch.Tensor) -> None:
        with peer.trace_step(model):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    return step


VARIANTS = {"plain": plain, "shim": shim, "traceml": traceml}


def train(variant: str, asked: Iterator[int]) -> Iterator[dict[str, float]]:
    """For each number in ``asked``, what so many steps took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = VARIANTS[variant](model, optimizer)
    batches = iter(torch.utils.data.DataLoader(Batches(), batch_size=None))

    def run(steps: int) -> None:
        for batch in itertools.islice(batches, steps):
            step(batch)

    for steps in itertools.chain([WARM_UP_STEPS], asked):
        run(FIRST_STEPS)
        begun_ns, begun_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        run(steps)
        ended_ns, ended_cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        yield {
            "step_us": (ended_ns - begun_ns) / steps / 1e3,
            "cpu_us": (ended_cpu_ns - begun_cpu_ns) / steps / 1e3,
            "rss_kib": _resident_kib(),
        }


def _resident_kib() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return float(line.split()[1])


def main(variant: str, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw", encoding="ascii") as lines:
            for answer in train(variant, map(int, lines)):
                print(json.dumps(answer), file=lines, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
