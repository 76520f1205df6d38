"""What idle time of the device is put down to; idle says when which applies."""

from __future__ import annotations

from typing import Literal, get_args

Cause = Literal[
    "compile", "gc", "checkpoint", "data_loading", "allocator", "communication",
    "synchronization", "copy", "launch", "dispatch", "host", "kernel_gap", "unexplained",
]  # fmt: skip
CAUSES: tuple[Cause, ...] = get_args(Cause)
