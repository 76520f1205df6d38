"""Estimates how busy the ranks keep each device, for the simulated devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from warpwatch_telemetry.state import RankKey, RankState

# A rank that finished no step for this long does not load its device.
IDLE_AFTER_S = 3.0


class RankLoad:
    """The load by device. ``ranks``: all current ranks; ``uuid_of``: the UUID of an index."""

    def __init__(
        self,
        ranks: Callable[[], Iterable[RankState]],
        uuid_of: Callable[[int], str],
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._ranks = ranks
        self._uuid_of = uuid_of
        self._wall = wall
        self._seen: dict[RankKey, tuple[float, float]] = {}

    def __call__(self, index: int) -> float | None:
        """Return the share of time that the device computes; None if it has no rank."""
        uuid = self._uuid_of(index)
        ranks = [rank for rank in self._ranks() if rank.device == uuid]
        return max((self._share(rank) for rank in ranks), default=None)

    def _share(self, rank: RankState) -> float:
        """Return one minus the share of waiting in the newest steps."""
        if rank.last_step_time is None or self._wall() - rank.last_step_time > IDLE_AFTER_S:
            return 0.0
        waited_s = sum(rank.phases_s.get(name, 0.0) for name in ("data_wait", "comm"))
        key = rank.key
        before_s, before_time = self._seen.get(key, (waited_s, 0.0))
        if rank.last_step_time <= before_time:
            return 0.9
        self._seen[key] = (waited_s, rank.last_step_time)
        elapsed_s = rank.last_step_time - before_time
        return min(0.97, max(0.05, 0.97 * (1 - (waited_s - before_s) / elapsed_s)))
