"""A plain PyTorch loop of short steps, by itself or watched by the calls of a peer.

    python benchmarks/training_loop.py VARIANT STEPS RESULT

VARIANT: ``plain`` (also what `warpwatch run` and `traceml run` start), ``shim`` or ``traceml``,
whose calls are then in the loop. Writes JSON into the file RESULT: median step and processor time
of the training thread a step in microseconds, resident memory in KiB.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

BATCH, WIDTH = 32, 64
WARM_UP_STEPS = 200

Watch = Callable[[str], AbstractContextManager[Any]]


class Batches(torch.utils.data.Dataset):  # type: ignore[misc]
    """One batch again and again: loading costs next to nothing."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._batch = torch.randn(BATCH, WIDTH)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        if index >= self._count:
            raise IndexError
        return self._batch


def nothing(part: str) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def shim() -> Watch:
    import warpwatch.client as warpwatch

    monitor = warpwatch.attach(job="benchmark")
    return lambda part: monitor.step(samples=BATCH) if part == "step" else monitor.phase(part)


def traceml(model: torch.nn.Module) -> Watch:
    """It finds the phases by itself."""
    peer = importlib.import_module("traceml_ai")
    peer.init()
    return lambda part: peer.trace_step(model) if part == "step" else contextlib.nullcontext()


def train(variant: str, steps: int) -> dict[str, float]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    watch = shim() if variant == "shim" else traceml(model) if variant == "traceml" else nothing
    loader = torch.utils.data.DataLoader(Batches(steps + WARM_UP_STEPS), batch_size=None)
    ended_ns, spent_ns = [], []
    for batch in loader:
        with watch("step"):
            with watch("forward"):
                loss = model(batch).square().mean()
            optimizer.zero_grad()
            with watch("backward"):
                loss.backward()
            with watch("optimizer"):
                optimizer.step()
        ended_ns.append(time.perf_counter_ns())
        spent_ns.append(time.thread_time_ns())
    return {
        "step_us": _median_us(ended_ns[WARM_UP_STEPS:]),
        "cpu_us": _median_us(spent_ns[WARM_UP_STEPS:]),
        "rss_kib": _resident_kib(),
    }


def _median_us(times_ns: list[int]) -> float:
    return statistics.median(later - earlier for earlier, later in pairwise(times_ns)) / 1e3


def _resident_kib() -> float:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmRSS:"))
    return float(line.split()[1])


if __name__ == "__main__":
    Path(sys.argv[3]).write_text(json.dumps(train(sys.argv[1], int(sys.argv[2]))))
