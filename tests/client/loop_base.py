"""What the training loops of the tests share. To import it installs the hooks: see run_loops.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from warpwatch import faults, hooks
from warpwatch.ring import DURATION, FIRST_PHASE, SAMPLES, TOKENS

state = hooks.install()

import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

LOOPS: dict[str, Callable[[], Any]] = {}
SLEEP_S = 0.02
# Of a loop on several ranks, before it left its groups.
PLACES: dict[str, Any] = {}


def loop(function: Callable[[], Any]) -> Callable[[], Any]:
    LOOPS[function.__name__] = function
    return function


def model(width: int = 8) -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(width, 1)


def data(batches: int, batch_size: int = 4) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(batches * batch_size, 8)), batch_size=batch_size)


def backward(net: torch.nn.Module, factor: float = 1.0) -> None:
    (net(torch.ones(4, 8)).sum() * factor).backward()


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
