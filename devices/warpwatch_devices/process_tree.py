"""Reads processes and their descendants from /proc, without reading all of it each time.

A node has thousands of processes and a few that matter. A round lists the PIDs, which is cheap, and
reads only processes that matter and new ones. All processes are read when those that matter have
changed, and once per minute, for reused PIDs.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
FULL_READ_INTERVAL_S = 60.0

# The number of the namespace that the kernel starts with: PROC_PID_INIT_INO in its proc_ns.h.
_HOST_PID_NAMESPACE = "pid:[4026531836]"
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# PF_KTHREAD in the kernel's sched.h.
_KERNEL_THREAD = 0x00200000


@dataclass(frozen=True, slots=True)
class Process:
    """A line of /proc/<pid>/stat, see proc(5); ``start_ticks`` tells reused PIDs apart.

    ``waited_s`` is the processor time of exited descendants that were waited for. ``io_wait_s`` is
    the main thread's wait for block devices, or 0 if the kernel does not account. ``core`` is the
    last one of the main thread. The process chooses its ``name``, at most 15 characters.
    """

    pid: int
    state: str
    parent: int
    start_ticks: int
    cpu_s: float
    waited_s: float
    resident_bytes: int
    io_wait_s: float
    threads: int = 1
    core: int = -1
    name: str = ""
    is_kernel: bool = False

    @property
    def identity(self) -> tuple[int, int]:
        return self.pid, self.start_ticks

    @property
    def alive(self) -> bool:
        """Not a zombie, which has ended and only waits to be waited for."""
        return self.state not in ("Z", "X")


def parse_stat(line: str) -> Process:
    """Parse a line; a name may hold blanks and parentheses. Raises ValueError."""
    head, _, tail = line.rpartition(")")
    number, _, name = head.partition(" (")
    fields = tail.split()
    try:
        # The field that proc(5) numbers n is at n - 3.
        return Process(
            pid=int(number),
            state=fields[0],
            parent=int(fields[1]),
            start_ticks=int(fields[19]),
            cpu_s=(int(fields[11]) + int(fields[12])) * _TICK_S,
            waited_s=(int(fields[13]) + int(fields[14])) * _TICK_S,
            resident_bytes=int(fields[21]) * _PAGE_BYTES,
            io_wait_s=int(fields[39]) * _TICK_S,
            threads=int(fields[17]),
            core=int(fields[36]),
            name=name,
            is_kernel=bool(int(fields[6]) & _KERNEL_THREAD),
        )
    except IndexError as error:
        raise ValueError(f"{len(fields)} fields") from error


def read_process(pid: int, proc: Path = _PROC) -> Process | None:
    """Return the process, or None if it has exited."""
    try:
        with open(proc / str(pid) / "stat", "rb") as file:
            return parse_stat(file.read().decode("utf-8", "replace"))
    except (OSError, ValueError):
        return None


def list_pids(proc: Path = _PROC) -> set[int]:
    """Return the PIDs of all visible processes."""
    return {int(name) for name in os.listdir(proc) if name.isdecimal()}


def descendants(root: int, processes: Mapping[int, Process]) -> list[Process]:
    """Return the descendants of ``root`` among ``processes`` (by PID)."""
    return _family({root}, processes.values())[1:] if root in processes else []


def sees_host_processes(proc: Path = _PROC) -> bool:
    """Return whether PIDs mean the same here as to the driver, which uses the host's.

    Otherwise a PID of the driver names another process here, or none.
    """
    try:
        return os.readlink(proc / "self/ns/pid") == _HOST_PID_NAMESPACE
    except OSError:
        return False


class ProcessTree:
    def __init__(self, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._roots: frozenset[int] = frozenset()
        self._strangers: set[int] = set()
        self._full_read_due = 0.0

    def read(self, roots: Collection[int]) -> dict[int, Process]:
        """Return ``roots`` and their living descendants by PID."""
        now = self._monotonic()
        if frozenset(roots) != self._roots or now >= self._full_read_due:
            self._roots = frozenset(roots)
            self._strangers.clear()
            self._full_read_due = now + FULL_READ_INTERVAL_S
        pids = list_pids()
        self._strangers &= pids
        read = (read_process(pid) for pid in pids - self._strangers)
        family = {
            process.pid: process
            for process in _family(self._roots, [found for found in read if found is not None])
        }
        self._strangers = pids - set(family)
        return family


def _family(roots: Iterable[int], processes: Iterable[Process]) -> list[Process]:
    """Return the roots among ``processes``, then generation by generation."""
    by_pid = {}
    children: dict[int, list[Process]] = {}
    for process in processes:
        by_pid[process.pid] = process
        children.setdefault(process.parent, []).append(process)
    found = {pid: by_pid[pid] for pid in roots if pid in by_pid}
    waiting = list(found)
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child.pid not in found:
                found[child.pid] = child
                waiting.append(child.pid)
    return list(found.values())
