"""A training loop without and with the shim, in turns: what the shim adds to a step.

    python -m benchmarks.gpu.step_loops SIZE DEVICE TURNS STEPS

Prints one JSON object. ``small``: launching costs more than computing, so that all that the shim
does is seen; ``large``: the GPU is the slower side, as it should be.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import warpwatch

_SIZES = {"small": (64, 32), "large": (2048, 2048)}
_PROFILED_STEPS = 20
_ATTACH_TIMEOUT_S = 15.0
_SYNCHRONIZING = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
_COUNTED = (*_SYNCHRONIZING, "cudaEventQuery", "cudaEventRecord", "cudaEventRecordWithFlags")

Loop = Callable[[int], None]


class Training:
    def __init__(self, size: str, device: str) -> None:
        width, batch = _SIZES[size]
        if device == "cpu":
            torch.set_num_threads(1)
            width, batch = 64, 32
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width, device=device) for _ in range(4)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6)
        self.batch = torch.randn(batch, width, device=device)
        self.cuda = device == "cuda"

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self.batch).square().mean()
        return loss

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()


def plain_loop(training: Training) -> Loop:
    def run(steps: int) -> None:
        for _ in range(steps):
            training.backward(training.forward())

    return run


def shim_loop(training: Training, monitor: warpwatch.Monitor) -> Loop:
    def run(steps: int) -> None:
        for _ in range(steps):
            with monitor.step(samples=32, tokens=4096):
                with monitor.phase("forward"):
                    loss = training.forward()
                with monitor.phase("backward"):
                    training.backward(loss)

    return run


def attach(loop: Loop, monitor: warpwatch.Monitor, cuda: bool) -> None:
    """Step until the daemon was found and, on a GPU, steps are timed there."""
    deadline = time.monotonic() + _ATTACH_TIMEOUT_S
    while monitor.clock.ring is None or (cuda and monitor.clock.gpu is None):
        if time.monotonic() > deadline:
            raise SystemExit("the shim found no daemon, or times no steps on the GPU")
        loop(1)
        time.sleep(0.01)


def in_turns(training: Training, loops: dict[str, Loop], turns: int, steps: int) -> dict[str, Any]:
    """Median µs a step of each, with the wait for the GPU at the end of a turn and without."""
    whole: dict[str, list[float]] = {name: [] for name in loops}
    issued: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(turns):
        # Who comes first changes, so that a clock that warms up favours nobody.
        for name in loops if turn % 2 else reversed(loops):
            training.synchronize()
            began = time.perf_counter()
            loops[name](steps)
            issued[name].append((time.perf_counter() - began) / steps * 1e6)
            training.synchronize()
            whole[name].append((time.perf_counter() - began) / steps * 1e6)
    return {
        name: {
            "step_us": round(statistics.median(whole[name]), 2),
            "issued_us": round(statistics.median(issued[name]), 2),
            "range_us": [round(min(whole[name]), 2), round(max(whole[name]), 2)],
        }
        for name in loops
    }


def profiled(training: Training, loop: Loop) -> dict[str, Any]:
    """Calls of the CUDA runtime a step, and the share of time in which kernels ran."""
    from torch.profiler import ProfilerActivity, profile

    training.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        began = time.perf_counter()
        loop(_PROFILED_STEPS)
        # By an event that is asked for, so that no call that waits is counted.
        end = torch.cuda.Event()
        end.record()
        while not end.query():
            time.sleep(0.0001)
        took_us = (time.perf_counter() - began) * 1e6
    events = profiler.events()
    names = Counter(event.name for event in events if event.name in _COUNTED)
    kernel_us = sum(
        event.time_range.elapsed_us()
        for event in events
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    )
    # The profiler itself waits for the device when it stops.
    return {
        "calls": dict(names),
        "synchronizing": sum(names[name] for name in _SYNCHRONIZING),
        "gpu_busy_ratio": round(kernel_us / took_us, 4),
    }


def main(size: str, device: str, turns: str, steps: str) -> None:
    training = Training(size, device)
    monitor = warpwatch.attach(job="step-loops")
    loops = {"plain": plain_loop(training), "shim": shim_loop(training, monitor)}
    loops["plain"](20)
    attach(loops["shim"], monitor, training.cuda)
    answer: dict[str, Any] = {"size": size, "turns": int(turns), "steps": int(steps)}
    answer["loops"] = in_turns(training, loops, int(turns), int(steps))
    if training.cuda:
        for loop in loops.values():
            profiled(training, loop)  # the profiler's first run is unlike the others
        answer["profiled"] = {name: profiled(training, loop) for name, loop in loops.items()}
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
