"""What the kernel says of the ranks' processes, where it shows them to this daemon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from warpwatch_daemon.ranks import process
from warpwatch_daemon.ranks.rank import Rank
from warpwatch_devices.memory_groups import memory_groups
from warpwatch_devices.process_tree import ProcessTree
from warpwatch_telemetry.records import RankEvent


class RankProcesses:
    """Looked at each ``process.INTERVAL_S``."""

    def __init__(self) -> None:
        self._tree = ProcessTree()
        self._due = 0.0

    def look(self, ranks: Iterable[Rank], now: float, at: float) -> Iterator[RankEvent]:
        """``now`` is wall clock, ``at`` monotonic."""
        if at < self._due:
            return
        self._due = at + process.INTERVAL_S
        seen = {rank.seen_process: rank for rank in ranks if rank.live}
        pids = {identity[0] for identity in seen if identity is not None}
        family = self._tree.read(pids) if pids else {}
        for pid in sorted(pids & family.keys()):
            rank = seen.get(family[pid].identity)
            # One that wrote another start time into its ring is not looked at.
            if rank is not None:
                rank.oom_kills.note(memory_groups(pid))
                detail = process.reading(family[pid], family)
                yield rank.event(now, "process", detail)
