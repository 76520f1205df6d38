"""Provides hooks, a clock and the loops by name for the training loops of the tests."""

import json
import mmap
import os
import random
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from inspect import signature
from typing import Any


class LoopClock:
    """The CPU time of this process, and what loops say they spend: the same on a busy machine."""

    def __init__(self) -> None:
        self._spent_ns = memoryview(bytearray(8)).cast("Q")

    def monotonic_ns(self) -> int:
        return time.process_time_ns() + self._spent_ns[0]

    def spend(self, seconds: float) -> None:
        self._spent_ns[0] += int(seconds * 1e9)

    def share(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._spent_ns = memoryview(mmap.mmap(file.fileno(), 8)).cast("Q")


CLOCK = LoopClock()
# The shim calls the function by name: an attribute to ask instead would cost each step.
time.monotonic_ns, monotonic_ns = CLOCK.monotonic_ns, time.monotonic_ns
from warpwatch import faults, hooks  # noqa: E402
from warpwatch.ring import DURATION, FIRST_PHASE, SAMPLES, TOKENS  # noqa: E402

time.monotonic_ns = monotonic_ns

# Under ``warpwatch run`` this import installs the hooks.
import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from tests.client import fork_server  # noqa: E402

state = hooks.install()

# The duration of a part of a loop, by the loops' clock.
PART_S = 1.0
# The places of a loop on several ranks, before it left its groups.
PLACES: dict[str, Any] = {}


def spend(parts: float = 1.0) -> None:
    CLOCK.spend(parts * PART_S)


def model(width: int = 8) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(width, 1)


def sgd(*nets: torch.nn.Module) -> Any:
    made = [torch.optim.SGD(net.parameters(), lr=0.01) for net in nets]
    return made if len(made) > 1 else made[0]


def trained() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    net = model()
    return net, sgd(net)


def data(batches: int, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(batches * batch_size, 8)), batch_size=batch_size)


def backward(net: torch.nn.Module) -> None:
    net(torch.ones(4, 8)).sum().backward()


def train(net: torch.nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 1) -> None:
    for _ in range(steps):
        backward(net)
        for optimizer in optimizers:
            optimizer.step()


def learn(net: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> None:
    net(batch).sum().backward()
    optimizer.step()


def by_hand(net: torch.nn.Module, batches: Iterable[Any]) -> None:
    """Learn of each batch without an optimizer."""
    for (batch,) in batches:
        net.zero_grad()
        net(batch).sum().backward()
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.01 * parameter.grad


def fit(net: torch.nn.Module, optimizer: torch.optim.Optimizer, batches: int) -> None:
    for (batch,) in data(batches):
        learn(net, optimizer, batch)


def reported(result: Any) -> dict[str, Any]:
    monitor = state.monitor
    if monitor is None:
        return {"result": result, "faults": faults.count()}
    clock = monitor.clock
    phases_ns = clock.totals[FIRST_PHASE:]
    return {
        "result": result,
        "faults": faults.count(),
        "clock": monitor.step_clock,
        "model": monitor.model,
        "parallel": PLACES,
        "steps": clock.steps,
        "samples": clock.totals[SAMPLES],
        "tokens": clock.totals[TOKENS],
        "other_s": (clock.totals[DURATION] - sum(phases_ns)) / 1e9,
        "phases_s": {
            name: ns / 1e9 for name, ns in zip(clock.phase_names, phases_ns, strict=False)
        },
    }


def run(name: str) -> None:
    """Print what was counted in a loop, as a line of JSON, and end the process.

    A loop is a function of one of the modules. ``sys.argv[1]`` is a folder for it.
    """
    modules = [import_module(module) for module in fork_server.LOOPS]
    (loop,) = (vars(module)[name] for module in modules if name in vars(module))
    random.seed(0)
    torch.manual_seed(0)
    # Most loops train one model.
    result = loop(*trained()) if "net" in signature(loop).parameters else loop()
    result = list(result) if isinstance(result, Iterator) else result
    print(json.dumps({"loop": name, **reported(result)}), flush=True)
    # The interpreter's own end takes longer than most loops.
    os._exit(0)
