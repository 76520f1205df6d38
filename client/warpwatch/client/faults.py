"""The boundary: an error inside the shim ends here and never reaches the user's code."""

from __future__ import annotations

import logging
from collections import deque

logger = logging.getLogger("warpwatch.client")
logger.addHandler(logging.NullHandler())

_MAX_KINDS = 100
_seen: set[str] = set()
_untold: deque[tuple[str, Exception]] = deque(maxlen=_MAX_KINDS)
_count = 0


def swallow(error: Exception) -> None:
    """Count the error, and keep each kind of it once for ``tell``. Never raises, never logs."""
    global _count
    _count += 1
    try:
        kind = f"{type(error).__name__}: {error}"[:200]
        if kind not in _seen and len(_seen) < _MAX_KINDS:
            _seen.add(kind)
            _untold.append((kind, error))
    except Exception:
        return


def tell() -> None:
    """Log what was swallowed, for the helper thread: the user's handlers may block or raise.

    At DEBUG, so that it prints nothing by itself.
    """
    while _untold:
        kind, error = _untold.popleft()
        logger.debug("internal error: %s", kind, exc_info=error)


def count() -> int:
    """Errors swallowed so far in this process."""
    return _count
