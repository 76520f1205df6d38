"""How long is waited after failures of somebody else's server or store."""

from __future__ import annotations

import time
from collections.abc import Callable

FIRST_S = 5.0
LONGEST_S = 120.0


class Pause:
    """FIRST_S, doubled with each failure up to ``longest_s``. ``clock``: monotonic."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, longest_s: float = LONGEST_S
    ) -> None:
        self._clock = clock
        self._longest_s = longest_s
        self._pause_s = 0.0
        self._until = float("-inf")

    @property
    def lasts(self) -> bool:
        return self._clock() < self._until

    def begin(self) -> bool:
        """After a failure: whether it is the first of several."""
        is_first = not self._pause_s
        self._pause_s = min(max(FIRST_S, 2 * self._pause_s), self._longest_s)
        self._until = self._clock() + self._pause_s
        return is_first

    def reset(self) -> None:
        self._pause_s = 0.0
