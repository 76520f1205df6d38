"""Accelerate: ``watch()`` before the loop, or nothing at all under ``warpwatch run``."""

from __future__ import annotations

from warpwatch import hooks


def watch() -> None:
    """Report the steps of prepared optimizers, gradient accumulation collapsed."""
    hooks.install()
