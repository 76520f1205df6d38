"""A network trained alone, with the shim, and timed by waiting for the GPU, in turns.

    python -m benchmarks.gpu.model_loops NETWORK MODE DEVICE TURNS STEPS

Prints one JSON object: median step in microseconds of each loop, and what the two others add to the
first one's in percent, with the 95 % bounds over turns. ``synchronized`` is how much monitoring
code times a step: torch.cuda.synchronize() at both ends.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch

import warpwatch
from benchmarks.gpu.networks import Workload
from benchmarks.gpu.step_loops import Loop, attach
from benchmarks.training import bounds

WARM_UP_STEPS = 10


def plain_loop(workload: Workload) -> Loop:
    def run(steps: int) -> None:
        for _ in range(steps):
            workload.run()

    return run


def shim_loop(workload: Workload, monitor: warpwatch.Monitor) -> Loop:
    samples = len(workload.batch)

    def run(steps: int) -> None:
        for _ in range(steps):
            with monitor.step(samples=samples), monitor.phase("forward"):
                workload.run()

    return run


def synchronized_loop(workload: Workload) -> Loop:
    times_s: list[float] = []

    def run(steps: int) -> None:
        times_s.clear()
        for _ in range(steps):
            _wait(workload)
            began = time.perf_counter()
            workload.run()
            _wait(workload)
            times_s.append(time.perf_counter() - began)

    return run


def _wait(workload: Workload) -> None:
    if workload.device == "cuda":
        torch.cuda.synchronize()


def in_turns(workload: Workload, loops: dict[str, Loop], turns: int, steps: int) -> Any:
    """Microseconds a step of every turn, the GPU's end included."""
    times: dict[str, list[float]] = {name: [] for name in loops}
    names = list(loops)
    for turn in range(turns):
        # Each comes first as often, so that a clock that warms up favours nobody.
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            _wait(workload)
            began = time.perf_counter()
            loops[name](steps)
            _wait(workload)
            times[name].append((time.perf_counter() - began) / steps * 1e6)
    return times


def compared(times: dict[str, list[float]]) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for name, turns in times.items():
        answer[name] = {"step_us": round(statistics.median(turns), 2)}
        if name != "plain":
            added = [
                100 * (us / alone - 1) for us, alone in zip(turns, times["plain"], strict=True)
            ]
            answer[name]["added_percent"] = round(statistics.median(added), 3)
            answer[name]["added_percent_95"] = [round(bound, 3) for bound in bounds(added)]
    return answer


def main(network: str, mode: str, device: str, turns: str, steps: str) -> None:
    if device == "cpu":
        torch.set_num_threads(1)
    workload = Workload(network, mode, device)
    monitor = warpwatch.attach(job="model-loops")
    shim = shim_loop(workload, monitor)
    plain = plain_loop(workload)
    plain(WARM_UP_STEPS)
    attach(shim, monitor, device == "cuda")
    loops = {"plain": plain, "shim": shim, "synchronized": synchronized_loop(workload)}
    times = in_turns(workload, loops, int(turns), int(steps))
    print(json.dumps({"network": network, "mode": mode, "loops": compared(times)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
