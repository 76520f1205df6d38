"""What the kernel says of the ranks' processes, where it shows them to this daemon."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from warpwatch_daemon.ranks import process
from warpwatch_daemon.ranks.processor import RankProcessor
from warpwatch_daemon.ranks.rank import Rank
from warpwatch_devices.core_users import ProcessorUse, Use, core_users
from warpwatch_devices.memory_groups import PROC, memory_groups, read_text
from warpwatch_devices.process_tree import Process, ProcessTree, descendants
from warpwatch_devices.processor_waits import parse_core_ticks
from warpwatch_telemetry.records import RankEvent

Identity = tuple[int, int]


class RankProcesses:
    """Looked at each ``process.INTERVAL_S``; all others where a rank waits long for a core."""

    def __init__(self) -> None:
        self._tree = ProcessTree()
        self._processors: dict[Identity, RankProcessor] = {}
        self._use = ProcessorUse()
        self._due = 0.0

    def look(self, ranks: Iterable[Rank], now: float, at: float) -> Iterator[RankEvent]:
        """``now`` is wall clock, ``at`` monotonic."""
        if at < self._due:
            return
        self._due = at + process.INTERVAL_S
        seen = {rank.seen_process: rank for rank in ranks if rank.live}
        pids = {identity[0] for identity in seen if identity is not None}
        family = self._tree.read(pids) if pids else {}
        # One that wrote another start time into its ring is not looked at.
        known = {
            family[pid]: rank
            for pid in sorted(pids & family.keys())
            if (rank := seen.get(family[pid].identity)) is not None
        }
        details = {own: process.reading(own, family) for own in known}
        self._look_at_processors(known, family, details, at)
        for own, rank in known.items():
            rank.oom_kills.note(memory_groups(own.pid))
            yield rank.event(now, "process", details[own])

    def _look_at_processors(
        self,
        known: Mapping[Process, Rank],
        family: Mapping[int, Process],
        details: Mapping[Process, dict[str, Any]],
        at: float,
    ) -> None:
        """Adds to the details what keeps the ranks from a core, and who used those cores."""
        ticks = parse_core_ticks(read_text(PROC / "stat")) if known else {}
        before = self._processors
        self._processors = {
            own.identity: before.get(own.identity) or RankProcessor(own.pid) for own in known
        }
        waiting = []
        for own, rank in known.items():
            processor = self._processors[own.identity]
            details[own].update(processor.look(at, ticks))
            rank.counts.grow(processor.take_counts())
            if processor.waits_long:
                waiting.append(own)
        risen = any(self._processors[own.identity].has_risen for own in waiting)
        uses = self._use.look(at, bool(waiting), risen)
        for own in waiting if uses else ():
            self._processors[own.identity].tell()
            details[own]["core_users"] = _described(own, known, family, uses)


def _described(
    own: Process, known: Mapping[Process, Rank], family: Mapping[int, Process], uses: list[Use]
) -> list[dict[str, Any]]:
    """``rank``: of the same job, where the process is that rank's or a child of it."""
    of_rank = {
        member.pid: rank.rank
        for process, rank in known.items()
        if rank.job == known[own].job
        for member in (process, *descendants(process.pid, family))
    }
    found = core_users(own.pid, known[own].owner_uid, uses)
    told = [asdict(user) | {"rank": of_rank.get(user.pid)} for user in found]
    return [{name: value for name, value in one.items() if value is not None} for one in told]
