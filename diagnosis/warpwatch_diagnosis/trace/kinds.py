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

# As written from 2022 on (lower case) and before (capitalised).
_CATEGORIES: dict[Kind, tuple[str, ...]] = {
    "operator": ("cpu_op", "Operator"),
    "annotation": ("user_annotation",),
    "runtime": (
        "cuda_runtime", "cuda_driver", "xpu_runtime", "xpu_driver", "mtia_runtime",
        "privateuse1_runtime", "privateuse1_driver", "Runtime",
    ),
    "kernel": ("kernel", "Kernel"),
    "copy": ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset"),
    "synchronization": ("cuda_sync",),
    "python": ("python_function",),
}  # fmt: skip
KINDS = {category: kind for kind, names in _CATEGORIES.items() for category in names}
# An instant; PyTorch before 1.12 gives it no category.
MEMORY_NAME = "[memory]"
CONCRETE = "Concrete Inputs"
# Of it only this is kept: a convolution's backward call that makes the gradient of its input or of
# its weight alone.
ONE_GRADIENT = "One gradient"
# What diagnosis reads of an event's ``args``; the rest is forgotten.
ARGUMENTS: dict[Kind, tuple[str, ...]] = {
    "operator": ("Input Dims", "Input type", "Call stack", CONCRETE, *_COLLECTIVE_ARGUMENTS),
    "kernel": (
        "device", "stream", "grid", "block", "blocks per SM", "warps per SM",
        "est. achieved occupancy %", "graph id", *_COLLECTIVE_ARGUMENTS,
    ),
    "copy": ("device", "stream", "bytes", "memory bandwidth (GB/s)"),
    "synchronization": ("device", "stream", "wait_on_stream"),
    "memory": ("Device Type", "Device Id", "Bytes", "Total Allocated", "Total Reserved"),
}  # fmt: skip
