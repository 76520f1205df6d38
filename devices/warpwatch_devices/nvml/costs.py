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
        self._spent: dict[str, tuple[int, float]] = {}
        self._drained: dict[str, tuple[int, float]] = {}
        self._errors: dict[tuple[str, str], int] = {}
        self._drained_errors: dict[tuple[str, str], int] = {}

    def add(self, reader: str, calls: int, seconds: float) -> None:
        before = self._spent.get(reader)
        if before is None:
            self._spent[reader] = (calls, seconds)
        else:
            self._spent[reader] = (before[0] + calls, before[1] + seconds)

    def add_error(self, reader: str, code: int) -> None:
        if meaning_of(code) in _ANSWERS:
            return
        self.errors += 1
        key = (reader, name_of(code))
        self._errors[key] = self._errors.get(key, 0) + 1

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
        for reader, (calls, seconds) in tuple(self._spent.items()):
            calls_before, seconds_before = self._drained.get(reader, (0, 0.0))
            if calls > calls_before:
                count("nvml_calls_total", reader, by=float(calls - calls_before))
                count("nvml_call_seconds_total", reader, by=seconds - seconds_before)
                self._drained[reader] = (calls, seconds)
        for key, errors in tuple(self._errors.items()):
            new = errors - self._drained_errors.get(key, 0)
            if new:
                count("nvml_errors_total", *key, by=float(new))
                self._drained_errors[key] = errors
