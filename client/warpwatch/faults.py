"""Keeps errors inside the shim away from the user's code."""

from __future__ import annotations

import functools
import logging
import threading
import traceback

# The module ``signal`` makes enums of the results: 0.4 ms for each error.
from _signal import NSIG, getsignal  # type: ignore[import-not-found]
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger("warpwatch")
logger.addHandler(logging.NullHandler())

_MAX_KINDS = 100
_seen: set[str] = set()
_pending: deque[tuple[str, str]] = deque(maxlen=_MAX_KINDS)
_count = 0


def swallow(error: Exception) -> None:
    """Count the error; keep each kind of it once for ``log_pending``. Never logs.

    Raises an error of the program's own signal handler, which ran while our code did.
    """
    global _count
    if threading.current_thread() is threading.main_thread() and _is_of_a_handler(error):
        raise error
    _count += 1
    try:
        kind = f"{type(error).__name__}: {error}"[:200]
        if kind not in _seen and len(_seen) < _MAX_KINDS:
            _seen.add(kind)
            # As text: a traceback would keep the program's own objects alive.
            _pending.append((kind, "".join(traceback.format_tb(error.__traceback__))))
    except Exception:
        return


def _is_of_a_handler(error: Exception) -> bool:
    """Return whether a signal handler raised the error, as for a time limit or a dead worker."""
    codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    for handler in map(getsignal, range(1, NSIG)):
        function = handler.func if isinstance(handler, functools.partial) else handler
        for called in (function, type(function).__call__):
            if getattr(called, "__code__", None) in codes:
                return True
    return False


def guarded(function: Callable[..., object]) -> Callable[..., None]:
    """Return the function without its result and without its errors."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except Exception as error:
            swallow(error)

    return call


def log_pending() -> None:
    """Log the errors at DEBUG, in the helper thread: the user's handlers may block or raise."""
    while _pending:
        kind, where = _pending.popleft()
        logger.debug("internal error: %s\n%s", kind, where)


def count() -> int:
    """Return the number of errors swallowed in this process."""
    return _count
