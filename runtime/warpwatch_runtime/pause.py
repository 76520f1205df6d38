"""Backoff after failures of another server or store."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_S = 5.0
LONGEST_S = 120.0


class Pause:
    """A pause of FIRST_S, doubled with each failure up to ``longest_s``."""

    def __init__(
        self, monotonic: Callable[[], float] = time.monotonic, longest_s: float = LONGEST_S
    ) -> None:
        self._monotonic = monotonic
        self._longest_s = longest_s
        self._pause_s = 0.0
        self._until = float("-inf")

    @property
    def lasts(self) -> bool:
        return self._monotonic() < self._until

    def begin(self) -> bool:
        """Start the pause after a failure, and return whether it is the first in a row."""
        is_first = not self._pause_s
        self._pause_s = min(max(FIRST_S, 2 * self._pause_s), self._longest_s)
        self._until = self._monotonic() + self._pause_s
        return is_first

    def reset(self) -> None:
        self._pause_s = 0.0
