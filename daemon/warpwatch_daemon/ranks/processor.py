"""What keeps one rank's process from a core, from one look to the next."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from warpwatch_devices.core_users import allowed_cores
from warpwatch_devices.memory_groups import CGROUP, PROC
from warpwatch_devices.processor_waits import (
    CoreTicks,
    RunQueue,
    Throttling,
    steal_share,
    throttling,
)

# From this share of the time on it is asked who has the cores, and again if it has risen by RISE.
LONG_WAIT = 0.05
RISE = 0.10


class RankProcessor:
    """Of two looks, what it waits for in between; ``tell`` when it was said who has its cores."""

    def __init__(self, pid: int, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._pid = pid
        self._proc, self._cgroup = proc, cgroup
        self._queue = RunQueue(pid, proc)
        self._throttling: Throttling | None = None
        self._ticks: CoreTicks = {}
        self._counts: dict[str, int] = {}
        self._wait_share = self._told_share = 0.0

    @property
    def waits_long(self) -> bool:
        return self._wait_share >= LONG_WAIT

    @property
    def has_risen(self) -> bool:
        return self._wait_share >= self._told_share + RISE

    def tell(self) -> None:
        """Who has its cores is known now."""
        self._told_share = self._wait_share

    def look(self, at: float, ticks: CoreTicks) -> Mapping[str, float]:
        """Fields of the detail of an event ``process``, shares of the time since the look before.

        core_wait_share: in which the thread that waited longest was ready and had no core.
        throttled_share: of the periods in which the CPU limit of its control group was reached;
        core_limit: that limit in cores. steal_share: in which the hypervisor had its cores.
        """
        shares: dict[str, float | None] = {}
        wait = self._queue.look(at)
        if wait is not None:
            shares["core_wait_share"] = wait.share
            self._counts["core_wait_ns"] = wait.wait_ns
        self._wait_share = 0.0 if wait is None else wait.share
        shares |= self._throttled()
        if any(stolen for _, stolen in ticks.values()):
            shares["steal_share"] = steal_share(
                self._ticks, ticks, allowed_cores(self._pid, self._proc)
            )
        self._ticks = ticks
        return {name: round(value, 4) for name, value in shares.items() if value is not None}

    def take_counts(self) -> Mapping[str, int]:
        """Nanoseconds since the last call, by name; what is not known is not there."""
        counts, self._counts = self._counts, {}
        return counts

    def _throttled(self) -> dict[str, float | None]:
        before = self._throttling
        now = self._throttling = throttling(self._pid, self._proc, self._cgroup)
        if before is None or now is None or now.periods < before.periods:
            return {}
        self._counts["throttled_ns"] = max(0, now.throttled_ns - before.throttled_ns)
        periods = now.periods - before.periods
        throttled = max(0, now.throttled_periods - before.throttled_periods)
        return {
            "throttled_share": throttled / periods if periods else 0.0,
            "core_limit": now.limit,
        }
