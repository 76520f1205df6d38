"""What keeps a process from a core: other threads, a CPU limit, the hypervisor.

The run queue: /proc/<pid>/task/*/schedstat has nanoseconds that a thread ran and that it was ready
and waited; /proc/<pid>/schedstat is of the main thread alone (sched-stats.rst of the kernel). A
limit: cpu.stat of the control groups; what it holds back counts as waiting in the run queue too.
The hypervisor: ``steal`` in /proc/stat, which no queue shows. Other users' processes may be read,
unless /proc is mounted with hidepid; what cannot be read, or is not there, is unknown.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from warpwatch_devices.memory_groups import CGROUP, PROC, control_groups, field, read_text

# More threads of one process are not looked at.
MAX_THREADS = 1024
# How often all threads are read; in between, the main one and those that were busy.
ALL_THREADS_INTERVAL_S = 10.0
# A thread that wants a core for less of the time decides nothing about a step.
BUSY_SHARE = 0.01


class ThreadTimes(NamedTuple):
    """Nanoseconds since the thread began."""

    run_ns: int
    wait_ns: int


def parse_schedstat(line: bytes) -> ThreadTimes | None:
    """None for what is no such line, and where the kernel does not account (all is 0)."""
    words = line.split()
    if len(words) != 3 or not all(map(bytes.isdigit, words)) or words[2] == b"0":
        return None
    return ThreadTimes(int(words[0]), int(words[1]))


def _schedstat(path: str) -> ThreadTimes | None:
    """Without pathlib and buffers, in a third of the time: there may be a thousand threads."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return parse_schedstat(os.read(fd, 256))
    except OSError:
        return None
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class QueueWait:
    """wait_ns: of all threads together. share: of the thread that waited longest, 0 to 1."""

    wait_ns: int
    share: float


class RunQueue:
    """How long the threads of one process wait for a core, from one look to the next."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._pid = pid
        self._folder = f"{proc}/{pid}/task"
        # What each thread had, and when (monotonic) it was read.
        self._threads: dict[int, tuple[ThreadTimes, float]] = {}
        self._busy: set[int] = set()
        self._all_due = float("-inf")

    def look(self, at: float) -> QueueWait | None:
        """Since the look before, monotonic time; None at the first and where nothing is known."""
        begins = not self._threads
        tids: Collection[int] = {self._pid, *self._busy}
        if at >= self._all_due:
            self._all_due = at + ALL_THREADS_INTERVAL_S
            tids = self._list()
            self._threads = {tid: self._threads[tid] for tid in tids if tid in self._threads}
        waits = [wait for tid in tids if (wait := self._look_at(tid, at, begins)) is not None]
        if begins or not waits:
            return None
        return QueueWait(sum(wait.wait_ns for wait in waits), max(wait.share for wait in waits))

    def _list(self) -> list[int]:
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        return sorted(int(name) for name in names if name.isdecimal())[:MAX_THREADS]

    def _look_at(self, tid: int, at: float, begins: bool) -> QueueWait | None:
        now = _schedstat(f"{self._folder}/{tid}/schedstat")
        if now is None:
            self._threads.pop(tid, None)
            self._busy.discard(tid)
            return None
        before, before_at = self._threads.get(tid, (ThreadTimes(0, 0), at))
        self._threads[tid] = (now, at)
        if now.run_ns < before.run_ns:
            # Its number was given out again.
            before, before_at = ThreadTimes(0, 0), at
        ran_ns, waited_ns = now.run_ns - before.run_ns, max(0, now.wait_ns - before.wait_ns)
        passed_ns = (at - before_at) * 1e9
        if begins or (passed_ns and ran_ns + waited_ns >= BUSY_SHARE * passed_ns):
            self._busy.add(tid)
        else:
            self._busy.discard(tid)
        return QueueWait(waited_ns, min(1.0, waited_ns / passed_ns) if passed_ns else 0.0)


@dataclass(frozen=True, slots=True)
class Throttling:
    """Of a control group with a CPU limit, since it was made.

    throttled_ns: summed over the cores that were held back. limit: in cores, None where unknown.
    """

    throttled_ns: int
    throttled_periods: int
    periods: int
    limit: float | None


def throttling(pid: int, proc: Path = PROC, cgroup: Path = CGROUP) -> Throttling | None:
    """Of the innermost group with a limit that was ever at work; None where there is none."""
    for group in control_groups(pid, "cpu", proc, cgroup):
        text = read_text(group / "cpu.stat")
        periods, throttled = field(text, "nr_periods"), field(text, "nr_throttled")
        # Version 2 in microseconds, version 1 in nanoseconds.
        usec, nsec = field(text, "throttled_usec"), field(text, "throttled_time")
        held_ns = nsec if usec is None else 1000 * usec
        if periods and throttled is not None and held_ns is not None:
            return Throttling(held_ns, throttled, periods, _limit(group))
    return None


def _limit(group: Path) -> float | None:
    words = read_text(group / "cpu.max").split() or [
        read_text(group / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    if len(words) != 2 or not all(word.isdigit() for word in words) or not int(words[1]):
        return None
    return int(words[0]) / int(words[1])


# By number of the core: ticks that it was there for, and of them those that were stolen.
CoreTicks = Mapping[int, tuple[int, int]]


def parse_core_ticks(text: str) -> CoreTicks:
    """From /proc/stat: user nice system idle iowait irq softirq steal; guests are in user."""
    cores = {}
    for line in text.splitlines():
        name, *words = line.split()[:9]
        if not name.startswith("cpu"):
            # The lines of interrupts, far longer, come after all cores.
            break
        if name[3:].isdigit() and len(words) == 8 and all(word.isdigit() for word in words):
            cores[int(name[3:])] = (sum(map(int, words)), int(words[7]))
    return cores


def steal_share(before: CoreTicks, now: CoreTicks, cores: Iterable[int]) -> float | None:
    """Of the time of these cores between two looks, 0 to 1; None where it is not known."""
    total = stolen = 0
    for core in cores:
        if core in before and core in now:
            total += now[core][0] - before[core][0]
            stolen += now[core][1] - before[core][1]
    return min(1.0, max(0.0, stolen / total)) if total > 0 else None


def parse_cores(text: str) -> frozenset[int]:
    """``0-2,8`` is 0, 1, 2 and 8; empty for what is no such list."""
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.strip().partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return frozenset()
    return frozenset(cores)
