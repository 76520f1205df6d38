"""Steps of many small operators, whose ends are written down, until a file appears.

    python benchmarks/paused_loop.py OPERATORS STOP RESULT [whole]

Writes JSON into the file RESULT: the wall clock in seconds at the end of every step. ``whole``: the
profiler builds an object of each event, as it does where it knows no ``trace_only``.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

# Looked for seldom: it is a system call.
STOP_EVERY_STEPS = 20


def build_every_event() -> None:
    from warpwatch.captures import torch_profiler

    torch_profiler._experimental_config = lambda **wanted: {}


def train(operators: int, stop: Path) -> list[float]:
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=1e-6)
    ended_s: list[float] = []
    while len(ended_s) % STOP_EVERY_STEPS or not stop.exists():
        value = weight
        for _ in range(operators):
            value = value * 1.0001
        optimizer.zero_grad()
        value.sum().backward()
        optimizer.step()
        ended_s.append(time.time())
    return ended_s


if __name__ == "__main__":
    if sys.argv[4:] == ["whole"]:
        build_every_event()
    Path(sys.argv[3]).write_text(json.dumps(train(int(sys.argv[1]), Path(sys.argv[2]))))
