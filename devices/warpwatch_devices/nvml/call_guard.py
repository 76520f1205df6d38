"""NVML calls of one thread that another thread can watch and give up.

A call inside the driver cannot be ended from outside. What can be done is to notice that it does
not return, to leave it alone with its thread, and to let another thread serve the other devices.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

from warpwatch_devices.nvml.costs import CallCosts


class CallAbandoned(Exception):
    """The guard was given up: whoever still holds it must touch nothing any more."""


class CallGuard:
    """``call`` is for one thread; everything else may be used from any."""

    def __init__(self, costs: CallCosts, reader: str) -> None:
        self._costs = costs
        self._reader = reader
        self._lock = threading.Lock()
        self._subject: object = None
        self._begun: float | None = None
        self._abandoned = False

    def call(
        self, subject: object, function: Callable[..., Any], *arguments: Any, reader: str = ""
    ) -> Any:
        """``function(*arguments)`` on behalf of ``subject``, which is not None.

        It goes on the account of ``reader``, or of the guard's own. Raises CallAbandoned instead
        of calling, or of returning, once the guard is given up.
        """
        self._enter(subject)
        begun = time.monotonic()
        try:
            return function(*arguments)
        finally:
            self._costs.add(reader or self._reader, 1, time.monotonic() - begun)
            self._leave()

    @property
    def in_flight(self) -> bool:
        return self._begun is not None

    def abandon(self) -> bool:
        """No further call; whether none is in flight, so that what calls use may be freed."""
        with self._lock:
            self._abandoned = True
            return self._begun is None

    def abandon_if_stuck(self, stuck_after_s: float) -> object:
        """Give the guard up if its call lasts longer than that; the call's subject, or None."""
        with self._lock:
            begun = self._begun
            if self._abandoned or begun is None or time.monotonic() - begun < stuck_after_s:
                return None
            self._abandoned = True
            return self._subject

    def _enter(self, subject: object) -> None:
        with self._lock:
            if self._abandoned:
                raise CallAbandoned
            self._subject = subject
            self._begun = time.monotonic()

    def _leave(self) -> None:
        with self._lock:
            self._begun = None
            if self._abandoned:
                raise CallAbandoned


def address_of(handle: Any) -> int:
    """What makes two handles of NVML the same: where they point."""
    return int(ctypes.cast(handle, ctypes.c_void_p).value or 0)
