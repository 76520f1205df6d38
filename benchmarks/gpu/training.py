"""Networks that train on a GPU with the shim; on the CPU they are tiny.

    python -m benchmarks.gpu.training turns NETWORK MODE DEVICE TURNS STEPS

trains a network alone and with the shim, in turns. It prints one JSON object: the median step in
µs of each loop, and what the shim adds with 95 % bounds over the turns.

    python -m benchmarks.gpu.training faults JOB SWITCH DEVICE

reads from the file SWITCH before each step which fault is on: ``data_stall``, ``item``,
``pageable``.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import warpwatch
from warpwatch_daemon.demo.processes import Switch

VOCABULARY = 4096
WARM_UP_STEPS = 10
PROFILED_STEPS = 20
ATTACH_TIMEOUT_S = 15.0
WAITING_CALLS = ("cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize")
STALL_S = 0.05
READ_VALUES = 200
PAGEABLE_BYTES, SMALL_PAGEABLE_BYTES = 512 * 2**20, 2**20

TrainStep = Callable[[], None]


def _perceptron() -> tuple[list[nn.Module], torch.Tensor]:
    """Return a network bound by kernel launches, which hides nothing of the shim's work."""
    return [nn.Linear(64, 64) for _ in range(4)], torch.randn(32, 64)


def _transformer(small: bool) -> tuple[list[nn.Module], torch.Tensor]:
    layers, width, heads, length, batch = (1, 32, 1, 16, 2) if small else (8, 768, 12, 512, 32)
    blocks = [
        nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        for _ in range(layers)
    ]
    tokens = torch.randint(0, VOCABULARY, (batch, length))
    return [nn.Embedding(VOCABULARY, width), *blocks, nn.Linear(width, VOCABULARY)], tokens


class TrainedNetwork:
    """A network (perceptron, transformer) with a batch and an optimizer.

    ``phases`` are the parts of a step in their order. mode: eager, compile, or graph, a CUDA graph
    with a single phase.
    """

    def __init__(self, network: str, mode: str, device: str) -> None:
        if device == "cpu":
            torch.set_num_threads(1)
        torch.manual_seed(0)
        layers, batch = _perceptron() if network == "perceptron" else _transformer(device == "cpu")
        self.device, self.batch = device, batch.to(device)
        self.layers = nn.Sequential(*layers).to(device)
        self._call = torch.compile(self.layers) if mode == "compile" else self.layers
        self._optimizer = torch.optim.SGD(self.layers.parameters(), lr=1e-6, momentum=0.9)
        self.phases: dict[str, Callable[[], None]] = {
            "forward": self._forward,
            "backward": lambda: self._loss.backward(),
            "optimizer": self._update,
        }
        if mode == "graph":
            self.phases = {"forward": self._record().replay}

    def step(self) -> None:
        for work in self.phases.values():
            work()

    def _forward(self) -> None:
        with torch.autocast(self.device, dtype=torch.bfloat16):
            self._loss: torch.Tensor = self._call(self.batch).square().mean()

    def _update(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _record(self) -> torch.cuda.CUDAGraph:
        """Record the whole step as one graph, after the warm-up on a side stream."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph


# --- turns ---


def _with_shim(network: TrainedNetwork, monitor: warpwatch.Monitor) -> TrainStep:
    """Return a step with the shim, once that has found the daemon and times steps on the GPU."""
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


def _step_us(network: TrainedNetwork, step: TrainStep, steps: int) -> float:
    """Time a turn, on a GPU by CUDA events that are polled, so that nothing waits in the driver."""
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


def _waiting_calls(step: TrainStep) -> int:
    """Count the CUDA runtime calls that wait for the GPU, including the profiler's own."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            step()
    names = Counter(event.name for event in profiler.events())
    return sum(names[name] for name in WAITING_CALLS)


def _bounds(values: list[float]) -> tuple[float, float]:
    """Return about 95 % bounds of the median (the notches of McGill, Tukey and Larsen 1978)."""
    low, median, high = statistics.quantiles(values, n=4)
    half = 1.57 * (high - low) / len(values) ** 0.5
    return median - half, median + half


def train_in_turns(name: str, mode: str, device: str, turns: str, steps: str) -> None:
    network = TrainedNetwork(name, mode, device)
    for _ in range(WARM_UP_STEPS):
        network.step()
    monitor = warpwatch.attach(job="step-loops")
    watched = _with_shim(network, monitor)
    alone_us, shim_turns = [], []
    for turn in range(int(turns)):
        # Each comes first equally often, so that a clock that warms up favours neither.
        for loop in (network.step, watched) if turn % 2 else (watched, network.step):
            first_step, us = monitor.clock.steps, _step_us(network, loop, int(steps))
            if loop is watched:
                shim_turns.append({"first_step": first_step, "steps": int(steps), "step_us": us})
            else:
                alone_us.append(us)
    added_us = [turn["step_us"] - us for turn, us in zip(shim_turns, alone_us, strict=True)]
    result: dict[str, Any] = {
        "step_us": statistics.median(alone_us),
        "added_us": statistics.median(added_us),
        "added_us_95": _bounds(added_us),
        "shim_turns": shim_turns,
    }
    if device == "cuda":
        # The first run of the profiler waits more often.
        _waiting_calls(network.step)
        result["waiting_calls"] = [_waiting_calls(loop) for loop in (network.step, watched)]
    print(json.dumps(result))


# --- faults ---


class FaultOfEachStep(IterableDataset):  # type: ignore[misc]
    """The fault that is on, per step; a data stall delays it."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch

    def __iter__(self) -> Iterator[str]:
        while True:
            fault = self._switch.get()
            if fault == "data_stall":
                time.sleep(STALL_S)
            yield fault


def train_with_faults(job: str, switch: str, device: str) -> None:
    network = TrainedNetwork("transformer", "eager", device)
    size = PAGEABLE_BYTES if device == "cuda" else SMALL_PAGEABLE_BYTES
    pageable, host_batch = torch.empty(size, dtype=torch.uint8), network.batch.cpu()
    fault = ""

    def read_back(layer: Any, given: Any, output: torch.Tensor) -> None:
        """Read values one by one after every layer; the CPU waits for each."""
        for value in output.flatten()[: READ_VALUES if fault == "item" else 0]:
            value.item()

    for layer in network.layers:
        layer.register_forward_hook(read_back)
    monitor = warpwatch.attach(job=job)
    loader = DataLoader(FaultOfEachStep(Switch(Path(switch))), batch_size=None)
    for fault in monitor.wrap(loader):
        with monitor.step(samples=len(network.batch)):
            with monitor.phase("h2d"):
                network.batch = host_batch.to(device, non_blocking=True)
                if fault == "pageable":
                    pageable.to(device)
            for name, work in network.phases.items():
                with monitor.phase(name):
                    work()


if __name__ == "__main__":
    way, *arguments = sys.argv[1:]
    (train_in_turns if way == "turns" else train_with_faults)(*arguments)
