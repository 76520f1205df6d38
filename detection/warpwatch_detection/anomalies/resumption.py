"""The first moments after a restart of the daemon, or a leap of the clock.

Records that were read before the restart are read again (the rendezvous rewinds), and deadlines
have passed while no one listened. For them time stood still: what was left of it when the daemon
went begins to run when it is back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from warpwatch_detection.anomalies.rank_devices import LiveRank, RankId
from warpwatch_telemetry.records import RankSeen, Record, Step

# Rings are read at once and live ranks have a heartbeat every second: all have shown up by then.
CONFIRM_S = 10.0


class Resumption:
    """``now``: of the restart; ``before``: of the newest record that was read before it."""

    def __init__(self, now: float, before: float, ranks: Mapping[RankId, LiveRank]) -> None:
        # As of the restart: the ranks themselves go on.
        self._known = {name: (rank.seen_time, rank.step_time) for name, rank in ranks.items()}
        self._unseen = set(ranks)
        self._away_s = 0.0
        self.skip(now, before)

    def skip(self, now: float, before: float) -> None:
        """Time stood still once more, between ``before`` and ``now``."""
        self._now = now
        if math.isfinite(before):
            self._away_s += max(0.0, now - before)
        self.over_time = now + max(CONFIRM_S, self._away_s)

    def put_off(self, deadline: float) -> float:
        """When a deadline falls: once all rings are read, and never for the time away alone."""
        if deadline <= self._now:
            deadline += self._away_s
        return max(self._now + CONFIRM_S, deadline)

    def take_gone(self, time: float) -> set[RankId]:
        """The ranks that lived before and have not shown up in time, each once."""
        if time < self._now + CONFIRM_S:
            return set()
        gone, self._unseen = self._unseen, set()
        return gone

    def knew(self, record: Record) -> bool:
        """Whether the record was read before the restart; its rank lives either way."""
        if not isinstance(record, Step | RankSeen):
            return False
        name = (record.job_id, record.rank)
        self._unseen.discard(name)
        known = self._known.get(name)
        if known is None:
            return False
        seen_time, step_time = known
        return record.time <= (step_time if isinstance(record, Step) else seen_time)
