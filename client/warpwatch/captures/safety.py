"""Checks whether a capture may be recorded now, and names the first reason against it.

docs/protocol.md lists the reasons. They are checked when a command is read and again when the
profiler starts.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from warpwatch.captures.profilers import program_profiles
from warpwatch.captures.recording import Command, cuda_in_use

# Each session leaves memory behind in the process (pytorch#193348: 318 MiB after 1,000).
MAX_CAPTURES = 50
# CUPTI and CUDA graphs in one process crash before this one (pytorch#150957, pytorch#151124).
_SAFE_CUDA = (12, 6)
# Python 3.13 crashed under with_stack (pytorch#144094, pytorch#142166, pytorch#148273) in the
# releases before this one.
_SAFE_STACKS_TORCH = (2, 8)
# Environment variables that put a library into the process which subscribes to CUPTI:
# https://docs.nvidia.com/cupti/main/main.html; the second is set by Nsight Systems.
_INJECTIONS = ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID")
# Modules that subscribe to CUPTI when they are used: a straggler detector, a profiler.
_SUBSCRIBERS = re.compile(r"nvidia_resiliency_ext\.(attribution\.)?straggler$|gpufl$|cupti$")


class Situation(NamedTuple):
    """The input of the checks. ``torch`` is ``None`` until the program has imported it."""

    command: Command
    torch: Any
    environ: Mapping[str, str]
    captures: int
    inbox_problem: str | None

    @property
    def cuda(self) -> Any:
        return cuda_in_use(self.torch)


Check = Callable[[Situation], "str | None"]


def refusal(situation: Situation) -> str | None:
    """Return the first reason against this capture, or None."""
    kind = situation.command.kind
    if kind not in _CHECKS:
        return "unknown_kind" if kind else "bad_command"
    if situation.environ.get("WARPWATCH_CAPTURES") == "0":
        return "disabled"
    for check in _CHECKS[kind]:
        reason = check(situation)
        if reason:
            return reason
    if situation.captures >= MAX_CAPTURES:
        return "too_many_captures"
    # Nsight Systems writes its files itself.
    return None if kind == "nsys" else situation.inbox_problem


def no_torch(situation: Situation) -> str | None:
    """Refuse if torch is not fully imported."""
    return None if hasattr(situation.torch, "autograd") else "no_torch"


def no_cuda(situation: Situation) -> str | None:
    return "no_cuda" if situation.cuda is None else None


def profiler_busy(situation: Situation) -> str | None:
    """Refuse while the program profiles itself or its schedule warms up."""
    enabled = getattr(situation.torch.autograd, "_profiler_enabled", None)
    runs = program_profiles() or (enabled is not None and enabled())
    return "profiler_busy" if runs else None


def is_in_backward(torch: Any) -> bool:
    """Return whether this thread is inside of autograd's engine; False before torch 2.1."""
    task = getattr(getattr(torch, "_C", None), "_current_graph_task_id", None)
    return task is not None and task() != -1


def unsafe_stacks(situation: Situation) -> str | None:
    old = _version(situation.torch.__version__) < _SAFE_STACKS_TORCH
    wanted = "stacks" in situation.command.options
    return "unsafe_stacks" if wanted and old and sys.version_info >= (3, 13) else None


def cuda_graphs(situation: Situation) -> str | None:
    """Refuse if CUDA graphs exist and this CUDA version crashes with them.

    Graphs are detected by inductor's graph trees and by memory pools: each graph that torch
    captures has one. Graphs without memory of their own and graphs made without torch are missed; a
    ``torch.cuda.MemPool`` is taken for one.
    """
    cuda = situation.cuda
    version = getattr(getattr(situation.torch, "version", None), "cuda", None)
    if cuda is None or version is None or _version(version) >= _SAFE_CUDA:
        return None
    live = "torch._inductor.cudagraph_trees" in sys.modules or any(
        tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        for segment in cuda.memory_snapshot()
    )
    return "cuda_graphs" if live else None


def cupti_busy(situation: Situation) -> str | None:
    """Refuse if something else uses CUPTI, which has one subscriber; it is for CUDA only."""
    if situation.cuda is None:
        return None
    for name in _INJECTIONS:
        if situation.environ.get(name):
            return f"cupti_busy: {name} is set"
    for name in list(sys.modules):
        if _SUBSCRIBERS.match(name):
            return f"cupti_busy: {name} is loaded"
    return None


def not_under_nsys(situation: Situation) -> str | None:
    return None if situation.environ.get("NSYS_PROFILING_SESSION_ID") else "not_under_nsys"


def memory_busy(situation: Situation) -> str | None:
    """Refuse if the program records the allocator's history, or if torch cannot report that."""
    if situation.cuda is None:
        return None
    enabled = getattr(situation.torch._C, "_cuda_isHistoryEnabled", None)
    if enabled is None:
        return "memory_unsupported"
    return "memory_busy" if enabled() else None


# The reasons against one kind only.
_CHECKS: dict[str, tuple[Check, ...]] = {
    "torch": (no_torch, profiler_busy, unsafe_stacks, cuda_graphs, cupti_busy),
    "memory": (memory_busy,),
    "nsys": (no_torch, not_under_nsys, no_cuda),
}


def _version(text: str) -> tuple[int, int]:
    """Return (2, 13) for ``2.13.0+cpu``; a version that cannot be read counts as new."""
    found = re.match(r"(\d+)\.(\d+)", str(text))
    return (int(found[1]), int(found[2])) if found else (1 << 30, 0)
