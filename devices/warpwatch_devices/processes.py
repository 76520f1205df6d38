"""Reads processor time, memory and disk waits of the processes that use a GPU.

``of="self"`` is the process, ``of="children"`` all its living descendants, such as the workers of a
data loader. Usage of exited children stays counted. ``process_info``, from the attribution, has the
owner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from warpwatch_devices.memory_groups import read_text
from warpwatch_devices.process_tree import Process, ProcessTree, descendants, sees_host_processes
from warpwatch_devices.source import Sink, Source, SourceContext
from warpwatch_runtime.supervisor import LoopRunner
from warpwatch_telemetry.metric import SeriesKey
from warpwatch_telemetry.samples import DeviceSample, HostSample, SourceHealth

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

        When a child is waited for, its whole usage is added to its parent's ``waited_s``: the part
        that was counted while it lived is subtracted. A child that was not waited for adds nothing.
        """
        before = self._children
        waited_s = process.waited_s - (self._process.waited_s if self._process else 0.0)
        for identity, child in now.items():
            old = before.get(identity)
            waited_s += child.waited_s - (old.waited_s if old else 0.0)
        ended = (child for identity, child in before.items() if identity not in now)
        return max(0.0, waited_s - sum(child.cpu_s + child.waited_s for child in ended))

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
