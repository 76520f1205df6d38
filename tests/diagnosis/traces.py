"""Writes small traces with known times, in µs, as the profiler does."""

import gzip
import json
import random
from pathlib import Path
from typing import Any

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
STEP_US = 10_000
MB = 1 << 20
# The ranks of a job on GPUs, and the delay of the latest one.
RANKS = 4
LATEST_US = 3000
# Real traces count from the epoch or from boot: far from 0, where a time means a lost clock.
ORIGIN_US = 1_700_000_000_000_000


class TraceFile:
    """Collects events; ``write`` puts them into a file."""

    def __init__(self, steps: int = 4, **head: Any) -> None:
        self.head = head
        self.events: list[dict[str, Any]] = []
        self.steps = steps
        self._correlation = 0
        for step in range(steps):
            self.annotation(f"ProfilerStep#{step + 3}", step * STEP_US, STEP_US)

    def event(self, cat: str, name: str, at_us: float, us: float, tid: Any, **args: Any) -> None:
        pid = 0 if cat in ("kernel", "gpu_memcpy", "gpu_user_annotation") else 77
        times = {"ts": ORIGIN_US + at_us, "dur": us}
        phase = "i" if name == "[memory]" else "X"
        self.events.append(
            {"ph": phase, "cat": cat, "name": name, "pid": pid, "tid": tid, **times, "args": args}
        )

    def annotation(self, name: str, at_us: float, us: float, tid: int = 77) -> None:
        self.event("user_annotation", name, at_us, us, tid)

    def operator(self, at_us: float, us: float, name: str = "aten::mm") -> None:
        self.event("cpu_op", name, at_us, us, 77)

    def kernel(
        self, at_us: float, us: float, launched_us: float, name: str = "gemm", launch_us: float = 5
    ) -> None:
        """A kernel and the call that launched it at ``launched_us``."""
        self._correlation += 1
        self.event("kernel", name, at_us, us, 7, correlation=self._correlation)
        self.event(
            "cuda_runtime", "cudaLaunchKernel", launched_us, launch_us, 77,
            correlation=self._correlation,
        )  # fmt: skip

    def each_step(self) -> range:
        return range(0, self.steps * STEP_US, STEP_US)

    def write(self, path: Path) -> Path:
        text = json.dumps(self.head | {"traceEvents": self.events})
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode(), 1))
        else:
            path.write_text(text)
        return path


def cpu_rank(
    rank: int,
    *,
    host_us: int = 0,
    loading_us: int = 0,
    waiting_us: int = 0,
    steps: int = 4,
    world: int = 2,
) -> TraceFile:
    """The steps of one rank on the CPU; operators take what the arguments leave of 10 ms."""
    trace = TraceFile(steps, distributedInfo={"backend": "gloo", "rank": rank, "world_size": world})
    for begin in trace.each_step():
        trace.annotation(LOADER, begin, loading_us)
        busy_from = begin + loading_us + host_us
        trace.operator(busy_from, STEP_US - loading_us - host_us - waiting_us)
        trace.annotation("gloo:all_reduce", begin + STEP_US - waiting_us, waiting_us, tid=99)
    return trace


def rank_trace(
    rank: int,
    *,
    late_us: float = 0,
    transfer_us: float = 500,
    clock_us: float = 0,
    first_step: int = 3,
    name: str = "allreduce",
    steps: int = 4,
    world: int = RANKS,
) -> TraceFile:
    """The steps: compute, then a collective that all ranks leave at 9.5 ms of the step.

    A rank that is late computes longer and enters it later.
    """
    trace = TraceFile(steps=0, distributedInfo={"rank": rank})
    for step, begin in enumerate(range(0, steps * STEP_US, STEP_US)):
        at, end = begin + clock_us, begin + clock_us + 9500
        trace.annotation(f"ProfilerStep#{step + first_step}", at, STEP_US)
        computed = 9500 - transfer_us - LATEST_US + late_us
        trace.kernel(at, computed, at - 50, name="gemm")
        trace.event(
            "kernel", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + computed, end - at - computed,
            20, **{"Collective name": name, "dtype": "Float", "Group size": world,
                   "Process Group Name": "0", "In msg nelems": MB << (step == 1),
                   "Out msg nelems": MB},
        )  # fmt: skip
        trace.kernel(end, 500, at, name="optimizer")
    return trace


def write_hostile(path: Path) -> Path:
    """Write a trace of 100 kB with millions of values that are not events, and return ``path``."""
    first, last = (json.dumps(one) for one in (TraceFile().events[0], TraceFile().events[1]))
    text = f'{{"traceEvents":[{first},{"0," * 4_000_000}{last}]}}'
    # Text that hardly compresses makes the ratio of the sizes an ordinary one.
    padding = bytes(random.Random(1).choices(b"0123456789abcdef", k=100_000)).decode()
    path.write_bytes(gzip.compress(f'{{"padding":"{padding}",{text[1:]}'.encode(), 1))
    return path
