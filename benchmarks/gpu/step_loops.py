"""A network trained alone and with the shim, in turns.

    python -m benchmarks.gpu.step_loops NETWORK MODE DEVICE TURNS STEPS

Prints one JSON object: the median step in µs of each loop, and what the shim adds with 95 % bounds
over the turns. Turns are timed by CUDA events, which are asked for until they have passed, so that
nothing waits in the driver.
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
from benchmarks.gpu.networks import TrainedNetwork
from benchmarks.training import bounds

WARM_UP_STEPS = 10
PROFILED_STEPS = 20
ATTACH_TIMEOUT_S = 15.0
WAITING_CALLS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")

TrainStep = Callable[[], None]


def with_shim(network: TrainedNetwork, monitor: warpwatch.Monitor) -> TrainStep:
    """Once the shim has found the daemon and, on a GPU, times steps there."""
    samples = len(network.batch)

    def step() -> None:
        with monitor.step(samples=samples):
            for name, work in network.phases.items():
                with monitor.phase(name):
                    work()

    deadline = time.monotonic() + ATTACH_TIMEOUT_S
    while monitor.clock.ring is None or (network.device == "cuda" and monitor.clock.gpu is None):
        if time.monotonic() > deadline:
            raise SystemExit("the shim found no daemon, or times no steps on the GPU")
        step()
        time.sleep(0.01)
    return step


def step_us(network: TrainedNetwork, step: TrainStep, steps: int) -> float:
    if network.device == "cpu":
        began = time.perf_counter()
        for _ in range(steps):
            step()
        return (time.perf_counter() - began) / steps * 1e6
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    while not end.query():
        time.sleep(0.0001)
    taken_ms: float = begin.elapsed_time(end)
    return taken_ms / steps * 1e3


def waiting_calls(step: TrainStep) -> int:
    """Calls of the CUDA runtime that wait for the GPU; the profiler's own are among them."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
    names = Counter(event.name for event in profiler.events())
    return sum(names[name] for name in WAITING_CALLS)


def main(name: str, mode: str, device: str, turns: str, steps: str) -> None:
    network = TrainedNetwork(name, mode, device)
    for _ in range(WARM_UP_STEPS):
        network.step()
    monitor = warpwatch.attach(job="step-loops")
    watched = with_shim(network, monitor)
    alone_us, shim_turns = [], []
    for turn in range(int(turns)):
        # Each comes first as often, so that a clock that warms up favours none.
        for loop in (network.step, watched) if turn % 2 else (watched, network.step):
            first_step, us = monitor.clock.steps, step_us(network, loop, int(steps))
            if loop is watched:
                shim_turns.append({"first_step": first_step, "steps": int(steps), "step_us": us})
            else:
                alone_us.append(us)
    added_us = [turn["step_us"] - us for turn, us in zip(shim_turns, alone_us, strict=True)]
    answer: dict[str, Any] = {
        "step_us": statistics.median(alone_us),
        "added_us": statistics.median(added_us),
        "added_us_95": bounds(added_us),
        "shim_turns": shim_turns,
    }
    if device == "cuda":
        # In its first run the profiler waits more often.
        waiting_calls(network.step)
        answer["waiting_calls"] = [waiting_calls(loop) for loop in (network.step, watched)]
    print(json.dumps(answer))


if __name__ == "__main__":
    main(*sys.argv[1:])
