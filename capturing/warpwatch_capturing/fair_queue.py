"""Work that waits by its owner, of whom each is served in turn: who has much delays itself."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

Work = Callable[[], object]


class FairQueue:
    """Any thread may call any method."""

    def __init__(self, most_per_owner: int) -> None:
        self._most = most_per_owner
        self._lock = threading.Lock()
        # By owner, who is next first.
        self._waiting: dict[str, deque[Work]] = {}

    def put(self, owner: str, work: Work) -> bool:
        """False, and nothing waits, when the owner has as much waiting as it may."""
        with self._lock:
            mine = self._waiting.setdefault(owner, deque())
            if len(mine) >= self._most:
                return False
            mine.append(work)
            return True

    def do_next(self) -> bool:
        """Do what is next; False when there is nothing."""
        with self._lock:
            if not self._waiting:
                return False
            owner, mine = next(iter(self._waiting.items()))
            del self._waiting[owner]
            work = mine.popleft()
            if mine:
                self._waiting[owner] = mine
        work()
        return True
