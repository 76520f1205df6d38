"""Ranks that have ended, and the rings of the dead that others continued: until when they stay."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from warpwatch_daemon.ranks.rank import Rank
from warpwatch_daemon.ranks.saved import Positions
from warpwatch_daemon.ranks.table import MAX_RINGS_PER_OWNER, OpenRing, RingCount
from warpwatch_telemetry.jobs import JobId

# How long the ring of an ended rank stays.
RING_AFTER_END_S = 600.0


class EndedRanks:
    """For the thread that polls. ``ranks``: all that are known, of which those that ended go.

    ``forget`` removes a ring and its files. ``at`` is monotonic.
    """

    def __init__(
        self,
        ranks: list[Rank],
        count: RingCount,
        positions: Positions,
        forget: Callable[[OpenRing], None],
    ) -> None:
        self._ranks = ranks
        self._count = count
        self._positions = positions
        self._forget = forget
        # Rings of the dead that another process continued, and when.
        self._left: list[tuple[OpenRing, float]] = []
        # Of them, those that go once so many positions are on disk.
        self._replaced: list[tuple[OpenRing, int]] = []

    @property
    def left(self) -> list[OpenRing]:
        return [ring for ring, _ in self._left]

    def leave(self, ring: OpenRing, at: float) -> None:
        """Its rank goes on in another ring."""
        self._left.append((ring, at))

    def replaced(self, ring: OpenRing, save: int) -> None:
        """One that was left goes, but only once its counts are on disk with the new ring."""
        self._replaced.append((ring, save))

    def drop_earlier(self, job: JobId, at: float) -> None:
        """The ended ranks of an earlier run give their series to the run that is shown as them."""
        for rank in list(self._ranks):
            same = (rank.job.owner, rank.job.name) == (job.owner, job.name)
            if same and rank.job.run != job.run and not rank.live:
                self._ranks.remove(rank)
                if rank.has_ring:
                    self.leave(rank.ring, at)

    def expire(self, at: float) -> None:
        for rank in list(self._ranks):
            if not rank.live and rank.has_ring and self._count.is_short(rank.ring.budget):
                # Another ring needs the place; what was counted stays, of the newest such ranks.
                self._forget(rank.ring)
                rank.has_ring = False
            if rank.ended_at is not None and at - rank.ended_at >= RING_AFTER_END_S:
                if rank.has_ring:
                    self._forget(rank.ring)
                self._ranks.remove(rank)
        self._drop_ringless()
        unsaved = {ring for ring, _ in self._replaced}
        for ring, since in list(self._left):
            is_short = self._count.is_short(ring.budget) and ring not in unsaved
            if is_short or at - since >= RING_AFTER_END_S:
                self._left.remove((ring, since))
                self._forget(ring)
        while self._replaced and self._replaced[0][1] <= self._positions.written:
            ring, _ = self._replaced.pop(0)
            self._left = [entry for entry in self._left if entry[0] is not ring]
            self._forget(ring)

    def _drop_ringless(self) -> None:
        """Of the ended ranks whose rings made room, each owner keeps the newest."""
        ringless: dict[str, list[Rank]] = defaultdict(list)
        for rank in self._ranks:
            if not (rank.live or rank.has_ring):
                ringless[rank.job.owner].append(rank)
        for ranks in ringless.values():
            for rank in ranks[:-MAX_RINGS_PER_OWNER]:
                self._ranks.remove(rank)
