"""The call of backward is the phase ``backward``; the first one makes the process a rank.

``Tensor.backward`` calls ``torch.autograd.backward`` by its name, so that is the one to wrap.
"""

from __future__ import annotations

from functools import wraps
from threading import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any

from warpwatch.client.accounts import LEAVE, OTHER
from warpwatch.client.hooks.flow import Flow

MODULE = "torch"


def install(module: ModuleType, flow: Flow) -> None:
    original = module.autograd.backward

    @wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if flow.compiles and flow.is_compiling():
            return original(*args, **kwargs)
        clock = flow.clock
        if (
            clock is None
            or not (clock.open and flow.backwards)
            or flow.in_backward
            or get_ident() != clock.thread
        ):
            return any_other(*args, **kwargs)
        flow.backwards += 1
        if flow.samples or flow.tokens:
            flow.count_batches()
        now = monotonic_ns()
        try:
            flow.in_backward = True
            clock.push((flow.backward_phase, now, OTHER))
            return original(*args, **kwargs)
        finally:
            flow.in_backward = False
            clock.push((LEAVE, monotonic_ns(), None))
            if flow.due is not None:
                flow.end_due()

    def any_other(*args: Any, **kwargs: Any) -> Any:
        if flow.off or not flow.begin_backward():
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            flow.end_backward()

    module.autograd.backward = backward
