"""The end of the process, where nothing else mends what is wrong."""

from __future__ import annotations

import time
from collections.abc import Callable


class LastResort:
    """Calls ``fail`` once with what has been wrong for ``grace_s`` without a break."""

    def __init__(
        self,
        fail: Callable[[str], None],
        grace_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fail = fail
        self._monotonic = monotonic
        self._grace_s = grace_s
        self._ailment = ""
        self._since = 0.0
        self._failed = False

    def consider(self, ailment: str) -> None:
        """``ailment``: one line on what is wrong now; empty: nothing is."""
        now = self._monotonic()
        if ailment != self._ailment:
            self._ailment, self._since = ailment, now
        if ailment and now - self._since >= self._grace_s and not self._failed:
            self._failed = True
            self._fail(ailment)
