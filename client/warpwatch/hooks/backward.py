"""The call of backward is the phase ``backward``; the first one makes the process a rank.

``Tensor.backward`` calls ``torch.autograd.backward`` by its name, so that is the one to wrap.
"""

from __future__ import annotations

from functools import wraps
from threading import get_ident
from time import monotonic_ns
from types import ModuleType
from typing import Any

from warpwatch.columns import CALLED, RETURNED
from warpwatch.hooks.hook_state import Flow
from warpwatch.hooks.lap import FETCHED, IN_BACKWARD, TRAINED

MODULE = "torch"


def install(module: ModuleType, flow: Flow) -> None:
    original = module.autograd.backward
    lap = flow.lap
    noted = lap.noted

    @wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        if lap.stage != FETCHED or get_ident() != lap.thread:
            return outside_of_laps(*args, **kwargs)
        noted[CALLED] = monotonic_ns()
        lap.stage = IN_BACKWARD
        try:
            return original(*args, **kwargs)
        finally:
            if lap.stage == IN_BACKWARD:
                noted[RETURNED] = monotonic_ns()
                lap.stage = TRAINED
            else:
                flow.leave_backward(lap.clock, monotonic_ns())

    def outside_of_laps(*args: Any, **kwargs: Any) -> Any:
        if flow.compiles and flow.is_compiling():
            return original(*args, **kwargs)
        lap.leave()
        clock = flow.clock
        if (
            clock is None
            or not (clock.open and flow.backwards)
            or flow.in_backward
            or get_ident() != clock.thread
        ):
            return any_other(*args, **kwargs)
        now = monotonic_ns()
        try:
            flow.enter_backward(clock, now)
            return original(*args, **kwargs)
        finally:
            flow.leave_backward(clock, monotonic_ns())

    def any_other(*args: Any, **kwargs: Any) -> Any:
        if flow.off or not flow.begin_backward():
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            flow.end_backward()

    module.autograd.backward = backward
