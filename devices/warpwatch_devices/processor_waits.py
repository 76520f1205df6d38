"""Measures what keeps a process from a core: other threads, a CPU limit, the hypervisor.

The run queue is in /proc/<pid>/task/*/schedstat: nanoseconds that a thread ran, and waited while
ready (sched-stats.rst of the kernel). A CPU limit is in cpu.stat of the control groups; throttled
time also counts as waiting in the run queue. The hypervisor's share is ``steal`` in /proc/stat. A
file that may not be read (hidepid) or is missing means unknown.

The users of a core are found by processor time between two readings of all processes, so whether
another process ran at the very moment is unknown.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from warpwatch_devices.attribution.control_groups import read_owner
from warpwatch_devices.memory_groups import CGROUP, PROC, control_groups, field, read_text
from warpwatch_devices.processes import Process, list_pids, overflow_uid, read_process

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
    """Parse the line; None if it is invalid or the kernel does not account (all is 0)."""
    words = line.split()
    if len(words) != 3 or not all(map(bytes.isdigit, words)) or words[2] == b"0":
        return None
    return ThreadTimes(int(words[0]), int(words[1]))


def _schedstat(path: str) -> ThreadTimes | None:
    """Read without pathlib and buffers, in a third of the time, as there may be 1,000 threads."""
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
    """The wait of all threads together, and the share of time of the longest waiter, 0 to 1."""

    wait_ns: int
    share: float


class RunQueue:
    """The time that the threads of one process wait for a core, between two polls."""

    def __init__(self, pid: int, proc: Path = PROC) -> None:
        self._pid = pid
        self._folder = f"{proc}/{pid}/task"
        # The times of each thread, and the monotonic time of their reading.
        self._threads: dict[int, tuple[ThreadTimes, float]] = {}
        self._busy: set[int] = set()
        self._all_due = float("-inf")

    def poll(self, at: float) -> QueueWait | None:
        """Return the wait since the last poll; None at the first and if nothing is readable."""
        begins = not self._threads
        tids: Collection[int] = {self._pid, *self._busy}
        if at >= self._all_due:
            self._all_due = at + ALL_THREADS_INTERVAL_S
            tids = self._list()
            self._threads = {tid: self._threads[tid] for tid in tids if tid in self._threads}
        waits = [wait for tid in tids if (wait := self._poll_thread(tid, at, begins)) is not None]
        if begins or not waits:
            return None
        return QueueWait(sum(wait.wait_ns for wait in waits), max(wait.share for wait in waits))

    def _list(self) -> list[int]:
        try:
            names = os.listdir(self._folder)
        except OSError:
            return []
        return sorted(int(name) for name in names if name.isdecimal())[:MAX_THREADS]

    def _poll_thread(self, tid: int, at: float, begins: bool) -> QueueWait | None:
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
    """The throttling of a control group with a CPU limit, since it was made.

    throttled_ns: the sum over the throttled cores. limit: in cores, None if unknown.
    """

    throttled_ns: int
    throttled_periods: int
    periods: int
    limit: float | None


def throttling(pid: int, proc: Path = PROC, cgroup: Path = CGROUP) -> Throttling | None:
    """Return that of the innermost group whose limit was hit, or else that has one, or None."""
    found: Throttling | None = None
    for group in control_groups(pid, "cpu", proc, cgroup):
        text = read_text(group / "cpu.stat")
        periods, throttled = field(text, "nr_periods"), field(text, "nr_throttled")
        # Version 2 in microseconds, version 1 in nanoseconds.
        usec, nsec = field(text, "throttled_usec"), field(text, "throttled_time")
        held_ns = nsec if usec is None else 1000 * usec
        if periods and throttled is not None and held_ns is not None:
            if throttled:
                return Throttling(held_ns, throttled, periods, _limit(group))
            found = found or Throttling(held_ns, throttled, periods, _limit(group))
    return found


def _limit(group: Path) -> float | None:
    words = read_text(group / "cpu.max").split() or [
        read_text(group / name).strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
    ]
    if len(words) != 2 or not all(word.isdigit() for word in words) or not int(words[1]):
        return None
    return int(words[0]) / int(words[1])


# By core: all its ticks, and the stolen ones.
CoreTicks = Mapping[int, tuple[int, int]]


def parse_core_ticks(text: str) -> CoreTicks:
    """Parse /proc/stat: user nice system idle iowait irq softirq steal; guests are in user."""
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
    """Return the stolen share of these cores' time, 0 to 1, or None if unknown."""
    total = stolen = 0
    for core in cores:
        if core in before and core in now:
            total += now[core][0] - before[core][0]
            stolen += now[core][1] - before[core][1]
    return min(1.0, max(0.0, stolen / total)) if total > 0 else None


def parse_cores(text: str) -> frozenset[int]:
    """Parse ``0-2,8`` into 0, 1, 2 and 8; an invalid list is empty."""
    cores: set[int] = set()
    try:
        for part in text.split(","):
            first, _, last = part.strip().partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    except ValueError:
        return frozenset()
    return frozenset(cores)


# After two polls, as reading 4,000 processes takes 0.1 s; the shorter if waiting has risen.
PAUSE_S, SHORT_PAUSE_S = 30.0, 4.0
# In cores; a smaller use delays no other process.
MIN_CORES = 0.05
# The number of processes that are examined, and that are reported.
MAX_LOOKED_AT = 32
MAX_TOLD = 3

Identity = tuple[int, int]


class Use(NamedTuple):
    """The use of cores (processor time per time) by a process and its children that ended."""

    process: Process
    cores: float


class ProcessorUse:
    """All processes, read twice in a row when a rank waits for a core."""

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._before: dict[Identity, Process] | None = None
        self._before_at = 0.0
        self._polled_at = float("-inf")

    def poll(self, at: float, wanted: bool, risen: bool = False) -> list[Use]:
        """Return the processes that used processors since the last poll, most first.

        at: monotonic time. risen: the last result is outdated, so poll again soon.
        """
        if self._before is None:
            pause_s = SHORT_PAUSE_S if risen else PAUSE_S
            if wanted and at >= self._polled_at + pause_s:
                self._before, self._before_at = self._read(), at
            return []
        before, self._before = self._before, None
        self._polled_at = at
        return uses(before, self._read(), at - self._before_at)

    def _read(self) -> dict[Identity, Process]:
        read = (read_process(pid, self._proc) for pid in list_pids(self._proc))
        return {process.identity: process for process in read if process is not None}


def uses(
    before: Mapping[Identity, Process], now: Mapping[Identity, Process], passed_s: float
) -> list[Use]:
    """Return the uses of at least MIN_CORES; that of an exited child is its parent's."""
    if passed_s <= 0:
        return []
    # A parent gets all that a child ever used, including the time before the first poll.
    ended_s: dict[int, float] = {}
    for identity, process in before.items():
        if identity not in now:
            used_s = process.cpu_s + process.waited_s
            ended_s[process.parent] = ended_s.get(process.parent, 0.0) + used_s
    found = []
    for identity, process in now.items():
        old = before.get(identity)
        own_s = process.cpu_s - (old.cpu_s if old else 0.0)
        waited_s = process.waited_s - (old.waited_s if old else 0.0)
        waited_s = max(0.0, waited_s - ended_s.get(process.pid, 0.0))
        if own_s + waited_s >= MIN_CORES * passed_s:
            found.append(Use(process, (own_s + waited_s) / passed_s))
    return sorted(found, key=lambda use: -use.cores)


@dataclass(frozen=True, slots=True)
class CoreUser:
    """A process that uses cores of another one.

    ``name`` is None if the owner of the other process may not see it. ``core``: the only core that
    it may run on, None for several.
    """

    pid: int
    cores: float
    name: str | None
    core: int | None


def core_users(pid: int, owner_uid: int, uses: Iterable[Use], proc: Path = PROC) -> list[CoreUser]:
    """Return the users of the cores of ``pid``, most first; itself if it uses above one core.

    Processes confined to these cores come before those seen there. Named are kernel threads, and
    processes of ``owner_uid`` in the same pod, or outside of all pods like ``pid``. Owners in other
    user namespaces are unknown.
    """
    cores, pod_uid = allowed_cores(pid, proc), _pod_uid(pid, proc)
    confined, seen_there = [], []
    for process, used in list(uses)[:MAX_LOOKED_AT]:
        own = allowed_cores(process.pid, proc)
        if not cores & own or (process.pid == pid and used <= 1.0 + MIN_CORES):
            continue
        is_same = _uid(process.pid, proc) == owner_uid and _pod_uid(process.pid, proc) == pod_uid
        is_named = process.is_kernel or (is_same and pod_uid is not None)
        core = min(own) if len(own) == 1 else None
        user = CoreUser(process.pid, round(used, 3), process.name if is_named else None, core)
        if own <= cores:
            confined.append(user)
        elif process.threads > 1 or process.core in cores:
            seen_there.append(user)
    return (confined + seen_there)[:MAX_TOLD]


def allowed_cores(pid: int, proc: Path = PROC) -> frozenset[int]:
    """Return the cores of the main thread, or none if the process has exited."""
    text = read_text(proc / str(pid) / "status")
    return parse_cores(text.partition("\nCpus_allowed_list:")[2].partition("\n")[0])


def _uid(pid: int, proc: Path) -> int | None:
    uid = field(read_text(proc / str(pid) / "status"), "Uid:")
    return None if uid == overflow_uid(proc) else uid


def _pod_uid(pid: int, proc: Path) -> str | None:
    """Return the pod's UID, empty outside of pods, None if unknown."""
    owner = read_owner(pid, "", proc)
    return None if owner is None else owner.pod_uid
