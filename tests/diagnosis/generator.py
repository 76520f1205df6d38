"""Simulates training processes and their GPUs, and writes what the profiler would have recorded.

Physics, not features: a host thread runs operators and launches work, which costs it time; the
device runs each stream's work in order, not before its launch has reached it; a full launch queue
and synchronizing calls block the host; a collective starts on a rank when that rank's device gets
to it and ends everywhere when the last rank has arrived and the bytes are transferred. The findings
of a rule follow from that alone.

Ranks are coroutines: each runs ahead on its own simulated clock and yields at a collective, whose
end is known when all ranks have launched it.
"""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tests.diagnosis.traces import TraceFile

QUEUE_LIMIT = 1024
# From the return of a launch call to the begin of its work on an idle device, and between two
# kernels of one stream.
LAUNCH_LATENCY_US = 4.0
KERNEL_GAP_US = 1.2
COMPUTE, COMMUNICATION = 7, 20
DEVICE = "NVIDIA A100-SXM4-40GB"

# When this rank's device begins the collective, and how long the transfer takes; answered with
# the common end.
Arrival = tuple[float, float]
Program = Generator[Arrival, float, None]


@dataclass(frozen=True)
class Machine:
    """speed: the factor for this rank's kernels. The costs are those of the host, in µs."""

    speed: float = 1.0
    launch_us: float = 5.0
    dispatch_us: float = 9.0
    python_us: float = 6.0
    kernel_noise: float = 0.03
    host_noise: float = 0.10


class Rank:
    """One process: a host clock, its device's streams, and the events that were recorded."""

    def __init__(self, rank: int, world: int, machine: Machine, random: Random) -> None:
        self.rank, self.world, self.machine, self.random = rank, world, machine, random
        self.now_us = 0.0
        self.free_us = {COMPUTE: 0.0, COMMUNICATION: 0.0}
        self.thread = 100
        self.recording = False
        self.trace = TraceFile(0, deviceProperties=[{"id": 0, "name": DEVICE}])
        self._begins_us: deque[float] = deque(maxlen=QUEUE_LIMIT)
        self._correlation = 0

    def spend(self, us: float) -> None:
        """Host time that leaves no event: Python, a sleep."""
        self.now_us += us * self._noise(self.machine.host_noise)

    @contextmanager
    def span(self, cat: str, name: str, **arguments: Any) -> Iterator[None]:
        """An event of the host around what happens inside."""
        begin_us, thread, recording = self.now_us, self.thread, self.recording
        yield
        if recording:
            self._record(cat, name, begin_us, self.now_us, thread, arguments)

    def operator(self, name: str, *kernels: tuple[str, float]) -> None:
        """An eager operator that launches its kernels, each (name, µs at normal speed)."""
        self.spend(self.machine.python_us)
        with self.span("cpu_op", name):
            self.spend(self.machine.dispatch_us)
            for kernel, us in kernels:
                self.launch(kernel, us)
            self.spend(1.5)

    def synchronize(self, name: str = "cudaDeviceSynchronize") -> None:
        with self.span("cuda_runtime", name, correlation=self._next()):
            self.now_us = max(self.now_us + 2.0, *self.free_us.values())

    def item(self) -> None:
        """Reads a value of the device: a copy of 4 bytes, and the wait for it."""
        self.spend(self.machine.python_us)
        with self.span("cpu_op", "aten::item"), self.span("cpu_op", "aten::_local_scalar_dense"):
            self.spend(2.0)
            self.copy("Memcpy DtoH (Device -> Pageable)", 4, gb_per_s=8.0, blocking=True)
            self.synchronize("cudaStreamSynchronize")

    def malloc(self, us: float) -> None:
        with self.span("cuda_runtime", "cudaMalloc", correlation=self._next()):
            self.spend(us)

    def free(self, us: float) -> None:
        """cudaFree waits until the device is idle."""
        with self.span("cuda_runtime", "cudaFree", correlation=self._next()):
            self.now_us = max(self.now_us, *self.free_us.values())
            self.spend(us)

    def launch(self, name: str, us: float) -> None:
        correlation = self._call("cudaLaunchKernel")
        us = us / self.machine.speed * self._noise(self.machine.kernel_noise)
        begin_us = self._begin(COMPUTE)
        self._work("kernel", name, COMPUTE, begin_us, begin_us + us, correlation=correlation)

    def copy(self, name: str, size: int, gb_per_s: float, blocking: bool) -> None:
        """On the compute stream; the host waits for it when ``blocking``."""
        recording, began_us = self.recording, self.now_us
        correlation = self._next()
        self.spend(self.machine.launch_us)
        begin_us = self._begin(COMPUTE)
        end_us = begin_us + 1.5 + size / gb_per_s / 1e3 * self._noise(self.machine.kernel_noise)
        if blocking:
            self.now_us = max(self.now_us, end_us)
        if recording:
            arguments = {"correlation": correlation}
            self._record("cuda_runtime", "cudaMemcpyAsync", began_us, self.now_us, self.thread,
                         arguments)  # fmt: skip
        self._work("gpu_memcpy", name, COMPUTE, begin_us, end_us, correlation=correlation,
                   bytes=size)  # fmt: skip

    def all_reduce(self, size: int, transfer_us: float, sequence: int | None) -> Program:
        """Enqueues it behind the gradients that the compute stream is to produce until now."""
        with self.span("cpu_op", "c10d::allreduce_"):
            self.spend(self.machine.dispatch_us)
            correlation = self._call("cudaLaunchKernelExC")
        begin_us = max(self._begin(COMMUNICATION), self.free_us[COMPUTE] + KERNEL_GAP_US)
        end_us = yield begin_us, transfer_us
        arguments = {
            "correlation": correlation, "Collective name": "allreduce", "dtype": "Float",
            "In msg nelems": size // 4, "Out msg nelems": size // 4, "Group size": self.world,
            "Process Group Name": "0",
        }  # fmt: skip
        if sequence is not None:
            arguments["Seq"] = sequence
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self._work("kernel", name, COMMUNICATION, begin_us, end_us, **arguments)

    def wait_for_communication(self) -> None:
        """The compute stream waits for the collectives; the host does not."""
        self.free_us[COMPUTE] = max(self.free_us[COMPUTE], self.free_us[COMMUNICATION])

    def _begin(self, stream: int) -> float:
        return max(self.now_us + LAUNCH_LATENCY_US, self.free_us[stream] + KERNEL_GAP_US)

    def _call(self, name: str) -> int:
        """A launch; blocks while the queue is full."""
        correlation = self._next()
        with self.span("cuda_runtime", name, correlation=correlation):
            if len(self._begins_us) == QUEUE_LIMIT:
                self.now_us = max(self.now_us, self._begins_us[0])
            self.spend(self.machine.launch_us)
        return correlation

    def _work(
        self, cat: str, name: str, stream: int, begin_us: float, end_us: float, **arguments: Any
    ) -> None:
        self.free_us[stream] = end_us
        self._begins_us.append(begin_us)
        if self.recording:
            self._record(cat, name, begin_us, end_us, stream, {"stream": stream, **arguments})

    def _next(self) -> int:
        self._correlation += 1
        return self._correlation

    def _noise(self, spread: float) -> float:
        return self.random.lognormvariate(0.0, spread)

    def _record(
        self, cat: str, name: str, begin_us: float, end_us: float, tid: int, args: dict[str, Any]
    ) -> None:
        self.trace.event(cat, name, begin_us, end_us - begin_us, tid, **args)

    def write(self, folder: Path, clock_us: float) -> Path:
        """As the profiler does, on a clock that is ``clock_us`` ahead."""
        for event in self.trace.events:
            event["ts"] = round(event["ts"] + clock_us, 3)
            event["dur"] = round(event["dur"], 3)
        if self.world > 1:
            about = {"backend": "nccl", "rank": self.rank, "world_size": self.world}
            self.trace.head["distributedInfo"] = about
        return self.trace.write(folder / f"rank{self.rank}.pt.trace.json")


def run(ranks: list[Rank], program: Callable[[Rank], Program]) -> None:
    """All ranks to their end, from collective to collective."""
    programs = [program(rank) for rank in ranks]
    arrivals = [next(running, None) for running in programs]
    while all(arrival is not None for arrival in arrivals):
        known = [arrival for arrival in arrivals if arrival is not None]
        end_us = max(begin for begin, _ in known) + max(us for _, us in known)
        arrivals = [_resume(running, end_us) for running in programs]
    assert all(arrival is None for arrival in arrivals), "ranks differ in their collectives"


def _resume(running: Program, end_us: float) -> Arrival | None:
    try:
        return running.send(end_us)
    except StopIteration:
        return None
