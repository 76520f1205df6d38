"""DeepSpeed: ``watch()`` before the loop, or nothing at all under ``warpwatch run``."""

from __future__ import annotations

from warpwatch import hooks


def watch() -> None:
    """Report what DeepSpeed engines do at the boundaries of gradient accumulation as steps."""
    hooks.install()
