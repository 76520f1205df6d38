"""What the profiler calls the events that diagnosis reads, and their arguments that it reads."""

from __future__ import annotations

from typing import Literal

Kind = Literal[
    "operator", "annotation", "runtime", "kernel", "copy", "synchronization", "python", "memory"
]

_COLLECTIVE_ARGUMENTS = (
    "Collective name", "In msg nelems", "Out msg nelems", "dtype", "Group size",
    "Process Group Name", "Process Group Ranks", "Seq",
)  # fmt: skip

# Categories as written from 2022 on (lower case) and before (capitalised).
KINDS: dict[str, Kind] = {
    "cpu_op": "operator",
    "Operator": "operator",
    "user_annotation": "annotation",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
    "xpu_runtime": "runtime",
    "xpu_driver": "runtime",
    "mtia_runtime": "runtime",
    "privateuse1_runtime": "runtime",
    "privateuse1_driver": "runtime",
    "Runtime": "runtime",
    "kernel": "kernel",
    "Kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
    "Memcpy": "copy",
    "Memset": "copy",
    "cuda_sync": "synchronization",
    "python_function": "python",
}
# An instant; PyTorch before 1.12 gives it no category.
MEMORY_NAME = "[memory]"
# What diagnosis reads of an event's ``args``; the rest is forgotten.
ARGUMENTS: dict[Kind, tuple[str, ...]] = {
    "operator": ("Input Dims", "Input type", "Call stack", *_COLLECTIVE_ARGUMENTS),
    "kernel": (
        "device", "stream", "grid", "block", "blocks per SM", "warps per SM",
        "est. achieved occupancy %", "graph id", *_COLLECTIVE_ARGUMENTS,
    ),
    "copy": ("device", "stream", "bytes", "memory bandwidth (GB/s)"),
    "synchronization": ("device", "stream", "wait_on_stream"),
    "memory": ("Device Type", "Device Id", "Bytes", "Total Allocated", "Total Reserved"),
}  # fmt: skip
