"""What is wrong with a pod's folders, counted and logged once and not at every look."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container

logger = logging.getLogger(__name__)


class Complaints:
    """``reject`` gets the reason of each that is new."""

    def __init__(self, reject: Callable[[str], None]) -> None:
        self._reject = reject
        self._made: set[tuple[str, str]] = set()

    def make(self, reason: str, uid: str, why: object) -> None:
        """``uid``: of the pod; empty: it is about the folder of all pods."""
        if (reason, uid) not in self._made:
            self._made.add((reason, uid))
            self._reject(reason)
            logger.warning("%s: pod %s: %s", reason, uid or "folders", why)

    def keep(self, uids: Container[str]) -> None:
        """Of other pods than these they may come again."""
        self._made = {(reason, uid) for reason, uid in self._made if uid in uids}
