"""Reads the ranks' processes from the kernel: what they use, and the users of their cores.

These are small files of /proc and of the control groups. Values are unknown if a file is missing or
may not be read, as in another PID namespace.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from warpwatch_daemon.ranks.rank import Rank
from warpwatch_devices.memory_groups import (
    CGROUP,
    PROC,
    field,
    group_headroom,
    host_headroom,
    memory_groups,
    read_text,
)
from warpwatch_devices.processes import Process, ProcessTree, descendants
from warpwatch_devices.processor_waits import (
    CoreTicks,
    ProcessorUse,
    RunQueue,
    Throttling,
    Use,
    allowed_cores,
    core_users,
    parse_core_ticks,
    steal_share,
    throttling,
)
from warpwatch_telemetry.records import RankEvent

Identity = tuple[int, int]


# The hang detector needs 20 s of idle readings, and must report a hang within 30 s.
INTERVAL_S = 2.0

# Uninterruptible: in a system call that waits for a disk or a file server.
_DISK_WAIT = "D"


def reading(
    process: Process, family: Mapping[int, Process], proc: Path = PROC, cgroup: Path = CGROUP
) -> dict[str, Any]:
    """Return the detail of a RankEvent ``process``.

    family: all processes by PID, at least the descendants of ``process``.

    cpu_s, io_bytes: processor time, and bytes read and written, of process and descendants.
    disk_wait: whether one of them waits for a disk or a file server now.
    anonymous_bytes: the process's own memory that no file backs.
    available_bytes, limit_bytes: the memory left, and the limit, in the tightest control group (or
    on the host).
    """
    members = [process, *descendants(process.pid, family)]
    groups = memory_groups(process.pid, proc, cgroup)
    memories = (host_headroom(proc), *map(group_headroom, groups))
    tightest = min((memory for memory in memories if memory is not None), default=None)
    known = {
        "cpu_s": round(sum(member.cpu_s + member.waited_s for member in members), 2),
        "io_bytes": _io_bytes((member.pid for member in members), proc),
        "disk_wait": any(member.state == _DISK_WAIT for member in members),
        "anonymous_bytes": _anonymous_bytes(process.pid, proc),
        "available_bytes": None if tightest is None else tightest.available,
        "limit_bytes": None if tightest is None else tightest.limit,
    }
    return {name: value for name, value in known.items() if value is not None}


def _io_bytes(pids: Iterable[int], proc: Path) -> int | None:
    """Return bytes read and written, or None if one process may not be read."""
    total = 0
    for pid in pids:
        text = read_text(proc / str(pid) / "io")
        read, written = field(text, "rchar:"), field(text, "wchar:")
        if read is None or written is None:
            return None
        total += read + written
    return total


def _anonymous_bytes(pid: int, proc: Path) -> int | None:
    kibibytes = field(read_text(proc / str(pid) / "status"), "RssAnon:")
    return None if kibibytes is None else 1024 * kibibytes


class RankProcesses:
    """The ranks' processes; all processes are read only if a rank waits long for a core."""

    def __init__(self) -> None:
        self._tree = ProcessTree()
        self._processors: dict[Identity, RankProcessor] = {}
        self._use = ProcessorUse()
        self._due = 0.0

    def poll(self, ranks: Iterable[Rank], now: float, at: float) -> Iterator[RankEvent]:
        """Yield an event ``process`` of each rank. ``now`` is wall clock, ``at`` monotonic."""
        if at < self._due:
            return
        self._due = at + INTERVAL_S
        seen = {rank.process.confirmed: rank for rank in ranks if rank.live}
        pids = {identity[0] for identity in seen if identity is not None}
        family = self._tree.read(pids) if pids else {}
        # A process that wrote another start time into its ring is ignored.
        known = {
            family[pid]: rank
            for pid in sorted(pids & family.keys())
            if (rank := seen.get(family[pid].identity)) is not None
        }
        details = {own: reading(own, family) for own in known}
        self._add_processor_waits(known, family, details, at)
        for own, rank in known.items():
            rank.process.oom_kills.update(memory_groups(own.pid))
            yield rank.event(now, "process", details[own])

    def _add_processor_waits(
        self,
        known: Mapping[Process, Rank],
        family: Mapping[int, Process],
        details: Mapping[Process, dict[str, Any]],
        at: float,
    ) -> None:
        ticks = parse_core_ticks(read_text(PROC / "stat")) if known else {}
        before = self._processors
        self._processors = {
            own.identity: before.get(own.identity) or RankProcessor(own.pid) for own in known
        }
        waiting = []
        for own, rank in known.items():
            processor = self._processors[own.identity]
            details[own].update(processor.poll(at, ticks))
            rank.counts.grow(processor.take_counts())
            if processor.waits_long:
                waiting.append(own)
        risen = any(self._processors[own.identity].has_risen for own in waiting)
        uses = self._use.poll(at, bool(waiting), risen)
        for own in waiting if uses else ():
            self._processors[own.identity].mark_reported()
            details[own]["core_users"] = _described(own, known, family, uses)


def _described(
    own: Process, known: Mapping[Process, Rank], family: Mapping[int, Process], uses: list[Use]
) -> list[dict[str, Any]]:
    """Return the users of its cores; ``rank`` if the process or its parent is one of the job."""
    of_rank = {
        member.pid: rank.rank
        for process, rank in known.items()
        if rank.job == known[own].job
        for member in (process, *descendants(process.pid, family))
    }
    found = core_users(own.pid, known[own].owner_uid, uses)
    told = [asdict(user) | {"rank": of_rank.get(user.pid)} for user in found]
    return [{name: value for name, value in one.items() if value is not None} for one in told]


# The share of waiting that starts a search for the cores' users, and the rise that repeats it.
LONG_WAIT = 0.05
RISE = 0.10


class RankProcessor:
    """A process's waits for a core. Call ``mark_reported`` after a report of the cores' users."""

    def __init__(self, pid: int, proc: Path = PROC, cgroup: Path = CGROUP) -> None:
        self._pid = pid
        self._proc, self._cgroup = proc, cgroup
        self._queue = RunQueue(pid, proc)
        self._throttling: Throttling | None = None
        self._ticks: CoreTicks = {}
        self._counts: dict[str, int] = {}
        self._wait_share = self._reported_share = 0.0

    @property
    def waits_long(self) -> bool:
        return self._wait_share >= LONG_WAIT

    @property
    def has_risen(self) -> bool:
        return self._wait_share >= self._reported_share + RISE

    def mark_reported(self) -> None:
        """Keep the present share: a larger one later means that the users are outdated."""
        self._reported_share = self._wait_share

    def poll(self, at: float, ticks: CoreTicks) -> Mapping[str, float]:
        """Return fields of an event ``process``, as shares of the time since the last call.

        core_wait_share: in which the thread that waited longest was ready without a core.
        throttled_share: of periods in which the CPU limit of its control group was reached.
        core_limit: that limit in cores. steal_share: in which the hypervisor had its cores.
        """
        shares: dict[str, float | None] = {}
        wait = self._queue.poll(at)
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
        """Return nanoseconds since the last call by name; unknown ones are absent."""
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
        return {"throttled_share": throttled / periods if periods else 0.0, "core_limit": now.limit}
