"""Limits how many records are read from each ring in a round.

The budget of a round is shared among owners, then among the rings of each: small requests are met
in full, and the others share the rest equally.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping
from typing import TypeVar

from warpwatch_daemon.ranks.table import OpenRing

logger = logging.getLogger(__name__)

# All rings together, on average. 1,024 rings at two steps per second write 2,048.
RECORDS_PER_S = 4_000
# At most this many at once after a quiet time: a restarted daemon reads 200 of each rank again.
MAX_SAVED = 12_000
# A new ring gets these even if a flood has spent the budget.
NEW_RING_RECORDS = 16

K = TypeVar("K", bound=Hashable)


class RecordBudget:
    """The records that may be read; ``reject`` gets a reason for each ring with skipped records.

    Times are of the monotonic clock.
    """

    def __init__(self, reject: Callable[[str], None]) -> None:
        self._reject = reject
        self._left = float(MAX_SAVED)
        self._filled_at: float | None = None
        # The rings that the log has named.
        self._named: set[OpenRing] = set()

    def share(self, rings: Collection[OpenRing], at: float) -> Mapping[OpenRing, int]:
        """Return for each ring how many of its newest records may be read in this round."""
        self._fill(at)
        self._named.intersection_update(rings)
        owners: dict[Hashable, dict[OpenRing, int]] = defaultdict(dict)
        for ring in rings:
            owners[ring.budget][ring] = ring.reader.peek()
        asked = {owner: sum(unread.values()) for owner, unread in owners.items()}
        granted = fair_shares(asked, int(self._left))
        shares: dict[OpenRing, int] = {}
        for owner, unread in owners.items():
            for ring, share in fair_shares(unread, granted[owner]).items():
                shares[ring] = self._take(ring, unread[ring], share)
        return shares

    def share_of_new(self, ring: OpenRing) -> int:
        """Return the share of a ring that was just opened."""
        unread = ring.reader.peek()
        return self._take(ring, unread, min(unread, max(NEW_RING_RECORDS, int(self._left))))

    def _take(self, ring: OpenRing, unread: int, share: int) -> int:
        self._left = max(0.0, self._left - share)
        if share < unread:
            self._reject("too_many_records")
            if ring not in self._named:
                self._named.add(ring)
                text = "%s of uid %d: more records than are read; its totals are counted"
                logger.warning(text, ring.name, ring.owner_uid)
        return share

    def _fill(self, at: float) -> None:
        if self._filled_at is not None:
            earned = max(0.0, at - self._filled_at) * RECORDS_PER_S
            self._left = min(MAX_SAVED, self._left + earned)
        self._filled_at = at


def fair_shares(asked: Mapping[K, int], total: int) -> dict[K, int]:
    """Return parts of ``total``: each request, or an equal part of the rest."""
    shares = {}
    for waiting, key in enumerate(sorted(asked, key=lambda key: asked[key])):
        shares[key] = min(asked[key], total // (len(asked) - waiting))
        total -= shares[key]
    return shares
