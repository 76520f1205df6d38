"""What NVML costs: calls, seconds and errors by reader."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

import pynvml

from warpwatch_devices.nvml.library import Meaning, code_of, meaning_of, name_of

T = TypeVar("T")

# What counts as an answer although it is no success.
_ANSWERS = (Meaning.UNSUPPORTED, Meaning.EMPTY)


class CallCosts:
    """Of one device. Its loop adds; the manager's loop alone drains."""

    def __init__(self) -> None:
        self.errors = 0
        # By name and labels of the agent's own counters.
        self._totals: dict[tuple[str, ...], float] = {}
        self._drained: dict[tuple[str, ...], float] = {}

    def add(self, reader: str, calls: int, seconds: float) -> None:
        self._add(calls, "nvml_calls_total", reader)
        self._add(seconds, "nvml_call_seconds_total", reader)

    def add_error(self, reader: str, code: int) -> None:
        if meaning_of(code) not in _ANSWERS:
            self.errors += 1
            self._add(1, "nvml_errors_total", reader, name_of(code))

    def _add(self, by: float, *counter: str) -> None:
        self._totals[counter] = self._totals.get(counter, 0.0) + by

    def measure(self, reader: str, call: Callable[..., T], *arguments: Any) -> T:
        """``call(*arguments)``, one call of NVML, counted for the reader. Raises NVMLError."""
        try:
            return self.time(reader, call, *arguments)
        except pynvml.NVMLError as error:
            self.add_error(reader, code_of(error))
            raise

    def time(self, reader: str, call: Callable[..., T], *arguments: Any) -> T:
        """The same, without counting an error."""
        begun = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.add(reader, 1, time.perf_counter() - begun)

    def drain(self, count: Callable[..., None]) -> None:
        """Add what came since the last time to the agent's own counters (``Sink.count``)."""
        for counter, total in tuple(self._totals.items()):
            new = total - self._drained.get(counter, 0.0)
            if new:
                count(*counter, by=new)
                self._drained[counter] = total
