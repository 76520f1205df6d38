"""What hooks owe ``torch.compile``: a wrapper vanishes from its graphs.

It begins with ``if is_compiling(): return original(...)``, which dynamo folds to the original call.
Those that run at every step (backward, the batch of a DataLoader, the optimizer's hooks) first look
whether a lap is at their border, and ask ``is_compiling`` outside of laps. That is enough, because
none is run while anything compiles: before the first torch.compile ``Lap.forbid`` has set the stage
to NONE, or from another thread ``Lap.thread`` to nobody's, and ``Lap.begin`` begins no other one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_compiling_of(torch: Any) -> Callable[[], bool]:
    """The function of this torch that dynamo takes for true."""
    found = getattr(getattr(torch, "compiler", None), "is_compiling", None)
    found = found or getattr(getattr(torch, "_utils", None), "is_compiling", None)
    return found if found is not None else _never


def has_compiled(eval_frame: Any) -> bool:
    """Whether the program used torch.compile before; also where that cannot be told."""
    patch = getattr(getattr(eval_frame, "TorchPatcher", None), "patch", None)
    cache_info = getattr(patch, "cache_info", None)
    return cache_info is None or cache_info().currsize > 0


def _never() -> bool:
    return False
