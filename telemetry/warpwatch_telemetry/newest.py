"""A mapping of bounded size: what is put is its newest, and the oldest goes."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def put_newest(kept: dict[K, V], key: K, value: V, at_most: int) -> None:
    """Put ``value`` last; where there are then more than ``at_most``, the first is dropped."""
    kept.pop(key, None)
    kept[key] = value
    if len(kept) > at_most:
        del kept[next(iter(kept))]
