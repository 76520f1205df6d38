"""Reads processes from /proc: any with its descendants, and the usage of those that use a GPU.

A node has thousands of processes and a few that matter. A round lists the PIDs, which is cheap, and
reads only processes that matter and new ones. All processes are read when those that matter have
changed, and once per minute, for reused PIDs.

In the series ``of="self"`` is the process, ``of="children"`` all its living descendants, such as
the workers of a data loader. Usage of exited children stays counted. ``process_info``, from the
attribution, has the owner.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from warpwatch_devices.memory_groups import read_text
from warpwatch_devices.source import Sink, Source, SourceContext
from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import DeviceSample, HostSample, SourceHealth

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


def overflow_uid(proc: Path = _PROC) -> int:
    """Return the UID that all users of other user namespaces have here."""
    text = read_text(proc / "sys/kernel/overflowuid").strip()
    return int(text) if text.isdigit() else 65534


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
        # Parents, which have lower PIDs as a rule, come first: see ProcessUsage.
        read = (read_process(pid) for pid in sorted(pids - self._strangers))
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


logger = logging.getLogger(__name__)

INTERVAL_S = 5.0
MAX_PROCESSES = 256
_DELAY_ACCOUNTING = Path("/proc/sys/kernel/task_delayacct")
_NOT_ON_THE_HOST = "PIDs of the host mean nothing here: the daemon needs the host's PID namespace"


class ProcessesSource(Source):
    name = "processes"

    def __init__(self, context: SourceContext) -> None:
        self._devices = context.devices
        self._tree = ProcessTree()
        self._usages: dict[tuple[int, int], ProcessUsage] = {}

    def start(self, supervisor: LoopRunner, sink: Sink) -> None:
        if not sees_host_processes():
            logger.info("processes that use a GPU are not followed: %s", _NOT_ON_THE_HOST)
            sink.publish_health(SourceHealth(self.name, True, _NOT_ON_THE_HOST))
            return
        supervisor.every(self.name, INTERVAL_S, lambda: self.read(sink))

    def read(self, sink: Sink) -> None:
        """Read the processes; without any on a GPU, /proc is not read."""
        begun, now = time.monotonic(), time.time()
        names = gpu_processes(self._devices())
        processes = self._tree.read(names) if names else {}
        self._follow([processes[pid] for pid in names if pid in processes], processes)
        accounted = io_wait_is_accounted()
        values: dict[SeriesKey, float] = {}
        for (pid, _), usage in self._usages.items():
            values |= usage.series((str(pid), names[pid]), io_wait=accounted)
        sink.publish_processes(HostSample(now, values))
        sink.publish_health(SourceHealth(self.name, True, duration_s=time.monotonic() - begun))

    def _follow(self, roots: Iterable[Process], processes: Mapping[int, Process]) -> None:
        """Update the usages; a reused PID starts again."""
        usages = {root.identity: self._usages.get(root.identity, ProcessUsage()) for root in roots}
        for (pid, _), usage in usages.items():
            usage.update(processes[pid], descendants(pid, processes))
        self._usages = usages


def gpu_processes(samples: Iterable[DeviceSample], at_most: int = MAX_PROCESSES) -> dict[int, str]:
    """Return the names of the processes on all devices by PID; the lowest ``at_most``."""
    names = {
        process.pid: process.name
        for sample in samples
        for process in sample.processes
        if process.pid > 0
    }
    return {pid: names[pid] for pid in sorted(names)[:at_most]}


def io_wait_is_accounted(switch: Path = _DELAY_ACCOUNTING) -> bool:
    """Return whether I/O waits are accounted: since Linux 5.14 this is a switch."""
    return read_text(switch).strip() != "0"


class ProcessUsage:
    """The usage of a process and its descendants, including exited ones."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._children: dict[tuple[int, int], Process] = {}
        self._children_cpu_s = 0.0
        self._children_io_wait_s = 0.0
        # Time of children that ended in the last round, and that no parent's ``waited_s`` had then.
        self._unwaited_s = 0.0

    def update(self, process: Process, children: Iterable[Process]) -> None:
        now = {child.identity: child for child in children}
        before = self._children
        for identity, child in now.items():
            old = before.get(identity)
            self._children_cpu_s += child.cpu_s - (old.cpu_s if old else 0.0)
            self._children_io_wait_s += child.io_wait_s - (old.io_wait_s if old else 0.0)
        self._children_cpu_s += self._of_ended(process, now)
        self._process, self._children = process, now

    def _of_ended(self, process: Process, now: Mapping[tuple[int, int], Process]) -> float:
        """Return the seconds of children that have exited since the last update.

        When a child is waited for, its whole usage is added to its parent's ``waited_s``. The part
        that was counted while it lived is subtracted, in the next round if its parent was read
        before. A child that was not waited for adds nothing.
        """
        before = self._children
        waited_s = process.waited_s - (self._process.waited_s if self._process else 0.0)
        for identity, child in now.items():
            old = before.get(identity)
            waited_s += child.waited_s - (old.waited_s if old else 0.0)
        ended = (child for identity, child in before.items() if identity not in now)
        used_s = sum(child.cpu_s + child.waited_s for child in ended)
        new_s = waited_s - used_s - self._unwaited_s
        self._unwaited_s = min(used_s, max(0.0, -new_s))
        return max(0.0, new_s)

    def series(self, own: tuple[str, str], *, io_wait: bool) -> dict[SeriesKey, float]:
        """Return the series; ``own`` is PID and name. Shared pages count for each process."""
        process, children = self._process, self._children.values()
        if process is None:
            return {}
        resident_bytes = sum(child.resident_bytes for child in children)
        used: dict[str, tuple[float, float]] = {
            "process_cpu_seconds_total": (process.cpu_s, self._children_cpu_s),
            "process_resident_memory_bytes": (process.resident_bytes, resident_bytes),
        }
        if io_wait:
            waits = (process.io_wait_s, self._children_io_wait_s)
            used["process_io_wait_seconds_total"] = waits
        values: dict[SeriesKey, float] = {("process_children", own): sum(c.alive for c in children)}
        for name, (of_self, of_children) in used.items():
            values[name, (*own, "self")] = round(of_self, 2)
            values[name, (*own, "children")] = round(of_children, 2)
        return values
