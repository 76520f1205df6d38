"""Shows the progress of a long command on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from warpwatch_runtime.command_line import say

# A shorter command prints nothing.
LINE_INTERVAL_S = 5.0


class Progress:
    """Prints lines at intervals; call ``show`` at any progress."""

    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._said_at = monotonic()
        self._said = ""

    def show(self, name: str, done: float, total: float, note: str = "") -> None:
        """Show the progress of ``name``; ``note``: the current work."""
        now = self._monotonic()
        share = f"{min(1.0, done / total):.0%}" if total > 0 else ""
        line = " ".join(filter(None, (f"{name}:", share, note)))
        if now - self._said_at >= LINE_INTERVAL_S and line != self._said:
            say(line, sys.stderr)
            self._said_at, self._said = now, line
