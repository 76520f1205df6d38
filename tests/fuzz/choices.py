"""An input's bytes as decisions: how targets build what no mutation of bytes would find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

T = TypeVar("T")

ODD_VALUES: tuple[Any, ...] = (
    None, True, False, -1, 0, 1, 2**31, 2**63, 2**64, -(10**30), 10**400, -1e300, 1.7e308, 1e-320,
    float("nan"), float("inf"), "", "x", "12", "NaN", "a\0b", "\ud800", "\n\x1b[31m", "é" * 300,
)  # fmt: skip
MAX_DEPTH = 4


class Choices:
    """When the bytes have run out every number is 0, so every input is a whole one."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        """Whether there are bytes left."""
        return self._at < len(self._data)

    def number(self, limit: int) -> int:
        """From 0 to ``limit`` - 1, which is at most 65,535."""
        size = 1 if limit <= 256 else 2
        found = int.from_bytes(self.take(size), "little")
        return found % limit

    def take(self, size: int) -> bytes:
        data = self._data[self._at : self._at + size]
        self._at += size
        return data

    def rest(self) -> bytes:
        return self.take(len(self._data))

    def of(self, options: Sequence[T]) -> T:
        return options[self.number(len(options))]

    def text(self) -> str:
        """Any characters, control characters and half ones among them."""
        return self.take(self.number(32)).decode(errors="surrogateescape")

    def value(self, keys: Sequence[str], depth: int = 0) -> Any:
        """What JSON or YAML can hold; mappings have these keys and others."""
        kind = self.number(8 if depth < MAX_DEPTH else 4)
        if kind == 0:
            return self.of(ODD_VALUES)
        if kind == 1:
            return self.number(1 << 16)
        if kind in (2, 3):
            return self.of(keys)
        if kind in (4, 5):
            return [self.value(keys, depth + 1) for _ in range(self.number(4))]
        return {self.of(keys): self.value(keys, depth + 1) for _ in range(self.number(6))}
