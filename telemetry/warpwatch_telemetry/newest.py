"""Provides mappings of bounded size that keep what was put last."""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class NewestMap(dict[K, V]):
    """A dict of at most ``limit`` entries: a set entry becomes the newest, the oldest goes.

    It is made empty; ``setdefault`` and ``update`` are not bounded.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        put_newest(self, key, value, self._limit)


def put_newest(kept: dict[K, V], key: K, value: V, limit: int) -> None:
    """Put ``value`` last; if there are then more than ``limit``, drop the first.

    For a dict that is saved and restored, which must be a plain one.
    """
    kept.pop(key, None)
    dict.__setitem__(kept, key, value)
    if len(kept) > limit:
        del kept[next(iter(kept))]
