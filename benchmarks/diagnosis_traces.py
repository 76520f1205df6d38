"""Writes synthetic Kineto traces of any length, laid out as PyTorch 2.x writes them.

A trace shows data-parallel training. Each step fetches a batch, launches kernels from nested
operators, all-reduces the gradients on a second stream and steps the optimizer. A kernel begins
when its launch has arrived and its stream is free. The same arguments give the same file.
"""

from __future__ import annotations

import gzip
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

# 3 operators, 2 runtime calls, a kernel and the two ends of its arrow. Real traces of training on a
# GPU have 30 to 35 % operators, 15 to 20 % calls, 9 to 15 % GPU events, 25 to 35 % arrows.
EVENTS_PER_KERNEL = 8
STEPS = 5
HOST, TRAIN, BACKWARD = 2910249, 2910249, 2919752
ORIGIN_US = 4458676000000.0
COMPUTE_STREAM, NCCL_STREAM = 7, 40
_HEAD = """
{
  "schemaVersion": 1,
  "deviceProperties": [
    {
      "id": 0, "name": "NVIDIA A100-SXM4-80GB", "totalGlobalMem": 85000000000,
      "computeMajor": 8, "computeMinor": 0, "numSms": 108
    }
  ],
  "distributedInfo": {"backend": "nccl", "rank": RANK, "world_size": RANKS},
  "traceEvents": ["""
_TAIL = """
  ],
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1711964646000000000
}
"""
_OPERATORS = (("aten::linear", "aten::addmm"), ("aten::layer_norm", "aten::native_layer_norm"),
              ("aten::gelu_", "aten::gelu"), ("aten::add_", "aten::add"))  # fmt: skip
_KERNELS = (
    ("ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn", 60.0),
    ("void at::native::vectorized_layer_norm_kernel<c10::BFloat16, float>(int, float)", 20.0),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::GeluKernel>(int)", 12.0),
    ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float> >(int)", 9.0),
)  # fmt: skip
_TYPES = '"Input type": ["c10::BFloat16", "c10::BFloat16"]'
_NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"
_LOADER = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"


def write_trace(path: Path, events: int, rank: int = 0, ranks: int = 1) -> Path:
    """Write about ``events`` elements of ``traceEvents``; gzip if the name ends in ``.gz``."""
    with gzip.open(path, "wt", 1) if path.suffix == ".gz" else path.open("w") as file:
        file.write(_HEAD.replace("RANKS", str(ranks)).replace("RANK", str(rank)))
        _write_events(file, _Rank(events // EVENTS_PER_KERNEL // STEPS, rank, ranks).events())
        file.write(_TAIL)
    return path


def _write_events(file: TextIO, events: Iterator[str]) -> None:
    separator = "\n"
    for event in events:
        file.write(separator + event)
        separator = ",\n"


class _Rank:
    def __init__(self, kernels_per_step: int, rank: int, ranks: int) -> None:
        self._kernels = kernels_per_step
        self._ranks = ranks
        self._noise = random.Random(rank)
        self._now = ORIGIN_US
        self._free = {COMPUTE_STREAM: self._now, NCCL_STREAM: self._now}
        self._number = itertools.count(1)

    def events(self) -> Iterator[str]:
        for step in range(STEPS):
            begin = self._now
            yield self._annotation(_LOADER, begin, 150.0)
            self._now += 200.0
            for index in range(self._kernels):
                yield from self._launch(index)
            self._now = max(self._now, *self._free.values())
            yield self._annotation(f"ProfilerStep#{step + 10}", begin, self._now - begin)

    def _launch(self, index: int) -> Iterator[str]:
        choice = index % len(_KERNELS)
        outer, inner = _OPERATORS[choice]
        thread = TRAIN if index < self._kernels // 3 else BACKWARD
        took = self._noise.uniform(18.0, 26.0)
        dims = f'"Input Dims": [[{8 << choice}, 1024], [1024, {256 << choice}]], {_TYPES}'
        yield self._operator(outer, thread, self._now, took, dims)
        yield self._operator(inner, thread, self._now + 1.5, took - 3.0, dims)
        yield self._operator("aten::empty", thread, self._now + 3.0, 2.5, '"Input Dims": [[]]')
        yield self._call("cudaStreamIsCapturing", thread, self._now + 6.0, 0.75, next(self._number))
        communicates = self._ranks > 1 and index % 40 == 39
        name, us = (_NCCL, 900.0) if communicates else _KERNELS[choice]
        stream = NCCL_STREAM if communicates else COMPUTE_STREAM
        launched = self._now + 8.0
        begin = max(self._free[stream], launched + 9.0)
        length = us * self._noise.uniform(0.3, 0.5)
        self._free[stream] = begin + length
        self._now += took + 1.0
        yield from self._kernel(name, stream, thread, launched, begin, length)

    def _kernel(
        self, name: str, stream: int, thread: int, launched: float, begin: float, us: float
    ) -> Iterator[str]:
        number = next(self._number)
        yield self._call("cudaLaunchKernel", thread, launched, 5.125, number)
        yield self._arrow("s", number, HOST, thread, launched)
        arguments = f"""{number}, "queued": 0, "device": 0, "context": 1,
      "stream": {stream}, "correlation": {number}, "registers per thread": 96,
      "shared memory": 400, "blocks per SM": 4.740741, "warps per SM": 75.851852,
      "grid": [512, 1, 1], "block": [512, 1, 1], "est. achieved occupancy %": 75"""
        yield _span("kernel", name, 0, stream, begin, us, arguments)
        yield self._arrow("f", number, 0, stream, begin)

    def _call(self, name: str, thread: int, begin: float, us: float, number: int) -> str:
        arguments = f'{number}, "cbid": 211, "correlation": {number}'
        return _span("cuda_runtime", name, HOST, thread, begin, us, arguments)

    def _operator(self, name: str, thread: int, begin: float, us: float, more: str) -> str:
        number = next(self._number)
        arguments = f'{number}, "Record function id": 0, {more}, "Ev Idx": {number}'
        return _span("cpu_op", name, HOST, thread, begin, us, arguments)

    def _annotation(self, name: str, begin: float, us: float) -> str:
        arguments = f'{next(self._number)}, "Ev Idx": 0'
        return _span("user_annotation", name, HOST, TRAIN, begin, us, arguments)

    def _arrow(self, end: str, number: int, process: int, thread: int, at: float) -> str:
        closing = ', "bp": "e"' if end == "f" else ""
        return f"""  {{
    "ph": "{end}", "id": {number}, "pid": {process}, "tid": {thread}, "ts": {at:.3f},
    "cat": "ac2g", "name": "ac2g"{closing}
  }}"""


def _span(
    category: str, name: str, process: int, thread: int, begin: float, us: float, arguments: str
) -> str:
    """Return a complete event; ``arguments`` begin with the value of ``External id``."""
    return f"""  {{
    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {process}, "tid": {thread},
    "ts": {begin:.3f}, "dur": {us:.3f},
    "args": {{
      "External id": {arguments}
    }}
  }}"""
