"""A PyTorch loop of short steps, as `warpwatch run` and `traceml run` start it or with their calls.

    python benchmarks/training_loop.py LOOP SOCKET

LOOP is a name of LOOPS. After each line with a number on the Unix socket it runs so many batches
and answers with a line of JSON: what a batch took and the processor time of the training thread in
it, in microseconds, resident memory in KiB. It ends when the socket is closed.
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
# Batches of one step where gradients are accumulated.
ACCUMULATED = 4
# Of a step under `run`: begin and end of data_wait and backward, begin of optimizer, its end with
# that of the step.
BORDERS = 6
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


def compiled(model: Any, optimizer: Any) -> Step:
    """By the back end that needs no compiler: the graph is traced, and run as it is."""
    return plain(torch.compile(model, backend="eager"), optimizer)


def accumulated(model: Any, optimizer: Any) -> Step:
    numbers = itertools.count(1)

    def step(batch: torch.Tensor) -> None:
        model(batch).square().mean().backward()
        if next(numbers) % ACCUMULATED == 0:
            optimizer.step()
            optimizer.zero_grad()

    return step


def cuda(model: Any, optimizer: Any) -> Step:
    """The shim takes the process for one that trains on a GPU."""
    import warpwatch

    simulated = _simulated_cuda()
    warpwatch.attach().clock.cuda = simulated
    on_cpu = plain(model, optimizer)

    def step(batch: torch.Tensor) -> None:
        on_cpu(batch)
        simulated.run()

    return step


def cuda_alone(model: Any, optimizer: Any) -> Step:
    """What the shim asks of the simulated GPU in a step, without the shim.

    All at once, which takes less than between the parts of a step: what is left to the shim is
    rather too much.
    """
    simulated = _simulated_cuda()
    events = [simulated.Event(enable_timing=True) for _ in range(BORDERS)]
    on_cpu = plain(model, optimizer)

    def step(batch: torch.Tensor) -> None:
        on_cpu(batch)
        stream = simulated.current_stream()
        for event in events:
            simulated.is_current_stream_capturing()
            event.record(stream)
        simulated.run()
        events[-1].query()
        for event in events:
            event.elapsed_time(events[-1])

    return step


def _simulated_cuda() -> Any:
    sys.path.append(str(Path(__file__).parents[1]))
    from tests.client.simulated_cuda import SimulatedCuda

    return SimulatedCuda()


def calls(model: Any, optimizer: Any) -> Step:
    import warpwatch

    monitor = warpwatch.attach()

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


_LOOPS = (plain, compiled, accumulated, cuda, cuda_alone, calls, traceml)
LOOPS = {loop.__name__: loop for loop in _LOOPS}


def train(loop: str, asked: Iterator[int]) -> Iterator[dict[str, float]]:
    """For each number in ``asked``, what so many steps took."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, 1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = LOOPS[loop](model, optimizer)
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


def main(loop: str, path: str) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        with connection.makefile("rw", encoding="ascii") as lines:
            for answer in train(loop, map(int, lines)):
                print(json.dumps(answer), file=lines, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
