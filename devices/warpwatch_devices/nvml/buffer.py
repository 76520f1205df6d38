"""Room for structs that NVML fills, kept from call to call and unpacked in one go."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable
from typing import Any

import pynvml

# How often a list may have grown between two calls.
_ATTEMPTS = 4


class Buffer:
    """It grows when they do not fit; until then, each list is one call."""

    def __init__(self, layout: struct.Struct, capacity: int = 32) -> None:
        self._layout = layout
        self._grow(capacity)

    def _grow(self, capacity: int) -> None:
        self._capacity = capacity
        self._bytes = bytearray(capacity * self._layout.size)
        self._pointer = (ctypes.c_char * len(self._bytes)).from_buffer(self._bytes)

    def fill(self, call: Callable[[Any, Any], int]) -> Iterable[tuple[int, ...]]:
        """What ``call(structs, count)`` writes. Raises NVMLError; empty is none."""
        code = pynvml.NVML_ERROR_INSUFFICIENT_SIZE
        for _ in range(_ATTEMPTS):
            count = ctypes.c_uint(self._capacity)
            code = call(self._pointer, ctypes.byref(count))
            if code != pynvml.NVML_ERROR_INSUFFICIENT_SIZE:
                break
            self._grow(max(2 * self._capacity, count.value + 8))
        if code != pynvml.NVML_SUCCESS:
            raise pynvml.NVMLError(code)
        return self._layout.iter_unpack(self._bytes[: count.value * self._layout.size])
