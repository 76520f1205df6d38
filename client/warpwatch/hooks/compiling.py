"""What hooks owe ``torch.compile``: a wrapper vanishes from its graphs.

It begins with ``if state.is_compiling(): return original(...)``, which dynamo folds to the original
call. Those that run at every step first look at ``state.compiles``, which costs no call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def is_compiling_of(torch: Any) -> Callable[[], bool]:
    """The function of this torch that dynamo takes for true. The newer one is the cheaper one."""
    compiler, utils = getattr(torch, "compiler", None), getattr(torch, "_utils", None)
    found = getattr(compiler, "is_dynamo_compiling", None)
    found = found or getattr(compiler, "is_compiling", None)
    found = found or getattr(utils, "is_compiling", None)
    return found if found is not None else _never


def has_compiled(eval_frame: Any) -> bool:
    """Whether the program used torch.compile before; also where that is not known."""
    patch = getattr(getattr(eval_frame, "TorchPatcher", None), "patch", None)
    cache_info = getattr(patch, "cache_info", None)
    return cache_info is None or cache_info().currsize > 0


def _never() -> bool:
    return False
