"""The program's own profiler: a capture of ours gives way to it, see captures/program_profiler.py.

With plain ``attach()`` the helper thread watches for it.
"""

from __future__ import annotations

from types import ModuleType

from warpwatch.captures import program_profiler
from warpwatch.hooks.hook_state import HookState

MODULE = program_profiler.MODULE


def install(module: ModuleType, state: HookState) -> None:
    program_profiler.watch(module)
