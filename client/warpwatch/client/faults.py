"""The boundary: an error inside the shim ends here and never reaches the user's code."""

from __future__ import annotations

import logging

logger = logging.getLogger("warpwatch.client")
logger.addHandler(logging.NullHandler())

_MAX_KINDS = 100
_seen: set[str] = set()
_count = 0


def swallow(error: Exception) -> None:
    """Count the error; log each kind of it once, at DEBUG so that it prints nothing by itself."""
    global _count
    _count += 1
    kind = f"{type(error).__name__}: {error}"
    if kind not in _seen and len(_seen) < _MAX_KINDS:
        _seen.add(kind)
        logger.debug("internal error: %s", kind, exc_info=error)


def count() -> int:
    """Errors swallowed so far in this process."""
    return _count
