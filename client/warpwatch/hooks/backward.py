"""The call of backward is the phase ``backward``; the first one makes the process a rank.

``Tensor.backward`` calls ``torch.autograd.backward`` by its name, so that is the one to wrap.
"""

from __future__ import annotations

from functools import wraps
from types import ModuleType
from typing import Any

from warpwatch.hooks.hook_state import HookState

MODULE = "torch"


def install(module: ModuleType, state: HookState) -> None:
    original = module.autograd.backward

    @wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if state.compiles and state.is_compiling():
            return original(*args, **kwargs)
        if not state.begin_backward():
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            state.end_backward()

    module.autograd.backward = backward
