"""Reads the processes on a GPU and its MIG devices: memory, share of the multiprocessors, names.

NVML returns host PIDs. A kept buffer makes each list a single call, and each list is read as rarely
as it may be.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from warpwatch_devices.memory_groups import read_text
from warpwatch_devices.nvml.counters import NewestSample
from warpwatch_devices.nvml.library import Buffer, CallCosts, Meaning, classify, function
from warpwatch_devices.nvml.readers import SLOW_S, rounds_of
from warpwatch_devices.processes import sees_host_processes
from warpwatch_telemetry.samples import DeviceProcess

# nvmlProcessInfo_v2_t: pid, usedGpuMemory, gpuInstanceId, computeInstanceId.
_PROCESS = struct.Struct("=I4xQII")
# nvmlProcessUtilizationSample_t: pid, timeStamp (µs), smUtil, memUtil, encUtil, decUtil (per cent).
_USE = struct.Struct("=I4xQIIII")
_NOT_AVAILABLE = 2**64 - 1
# The window of the first reading, which returns the whole history.
_FIRST_WINDOW_US = 1_000_000
# The driver samples its processes at least that often.
_SAMPLE_PERIOD_S = 1.0

COMPUTE = "nvmlDeviceGetComputeRunningProcesses"
MPS = "nvmlDeviceGetMPSComputeRunningProcesses"
GRAPHICS = "nvmlDeviceGetGraphicsRunningProcesses"


@dataclass(frozen=True, slots=True)
class Occupant:
    """A process in one of the lists; without MIG the instances are all ones."""

    pid: int
    memory_bytes: int | None
    gpu_instance: int
    compute_instance: int


class ProcessList:
    """One of NVML's process lists, by the name of its call without version."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._version = "_v3"
        self._buffer = Buffer(_PROCESS)

    def read(self, handle: Any) -> tuple[Occupant, ...]:
        """Return the processes of a list. Raises NVMLError."""
        processes = self._buffer.fill(lambda structs, count: self._call(handle, count, structs))
        return tuple(
            Occupant(pid, None if memory == _NOT_AVAILABLE else memory, gi, ci)
            for pid, memory, gi, ci in processes
        )

    def _call(self, *arguments: Any) -> int:
        """Call the list; drivers before 510 have another version."""
        try:
            return function(self._name + self._version)(*arguments)
        except pynvml.NVMLError_FunctionNotFound:
            self._version = "_v2"
            return function(self._name + self._version)(*arguments)


class ProcessUse:
    """The share of SM time by process, since the last reading."""

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._monotonic = monotonic
        self._buffer = Buffer(_USE)
        self._newest = NewestSample(wall)
        self._mean: dict[int, float] = {}
        self._read_at = 0.0

    def read(self, handle: Any) -> dict[int, float]:
        """Return the mean share (0 to 1) by PID. Raises NVMLError.

        No new samples mean that no process used the device, unless too little time has passed.
        """
        ask = function("nvmlDeviceGetProcessUtilization")
        self._newest.check()
        since = ctypes.c_ulonglong(self._newest.time_us)
        try:
            uses = self._buffer.fill(lambda structs, count: ask(handle, structs, count, since))
        except pynvml.NVMLError_NotFound:
            if self._monotonic() - self._read_at > _SAMPLE_PERIOD_S:
                self._mean = {}
            return self._mean
        self._mean, self._read_at = self.shares(uses), self._monotonic()
        return self._mean

    def shares(self, uses: Iterable[tuple[int, ...]]) -> dict[int, float]:
        """Return the mean of new samples: (PID, time in µs, SM share in per cent, …) each."""
        newest = self._newest
        newest.check()
        samples = [
            (pid, time_us, sm)
            for pid, time_us, sm, *_ in uses
            if pid and sm <= 100 and not newest.in_future(time_us)
        ]
        before_us = newest.time_us
        newest.time_us = max((time_us for _, time_us, _ in samples), default=before_us)
        after_us = before_us or newest.time_us - _FIRST_WINDOW_US
        by_pid: dict[int, list[int]] = {}
        for pid, time_us, sm in samples:
            if time_us > after_us:
                by_pid.setdefault(pid, []).append(sm)
        return {pid: sum(shares) / len(shares) / 100 for pid, shares in by_pid.items()}


class ProcessNames:
    """The names of executables, read once per process.

    A PID that has left the device is forgotten, so that its successor is read. Outside of the
    host's PID namespace there are no names.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._nameless = not sees_host_processes()

    def keep(self, pids: Iterable[int]) -> None:
        self._names = {pid: self._names[pid] for pid in pids if pid in self._names}

    def name(self, pid: int) -> str:
        name = self._names.get(pid)
        if name is None:
            name = self._names[pid] = "" if self._nameless else _executable(pid)
        return name


def _executable(pid: int) -> str:
    """Return the kernel's name of a process, or nothing if it has exited."""
    return read_text(Path(f"/proc/{pid}/comm")).strip()


def describe(
    occupants: Iterable[Occupant], use: dict[int, float] | None, names: ProcessNames
) -> tuple[DeviceProcess, ...]:
    """Return each process once, from all lists; ``use`` is None if unknown."""
    memory: dict[int, int | None] = {}
    for occupant in occupants:
        if memory.get(occupant.pid) is None:
            memory[occupant.pid] = occupant.memory_bytes
    return tuple(
        DeviceProcess(pid, names.name(pid), bytes_, None if use is None else use.get(pid, 0.0))
        for pid, bytes_ in memory.items()
    )


_PERIOD_S = 2.0
_FINAL = (Meaning.UNSUPPORTED, Meaning.NO_PERMISSION)
# GPU instance and compute instance of a process.
InstanceIds = tuple[int, int]


class GpuProcessReader:
    """The processes of one GPU and of its MIG devices, from one list for all.

    If that list is not permitted, ``by_instance`` is set: then each MIG device is queried.
    ``clocks``: as for ProcessUse.
    """

    def __init__(
        self, costs: CallCosts, phase: int, interval_s: float, *clocks: Callable[[], float]
    ) -> None:
        self.by_instance = False
        self._costs = costs
        self._phase = phase
        self._round = 0
        self._rounds = rounds_of(_PERIOD_S, interval_s)
        self._slow_rounds = rounds_of(SLOW_S, interval_s)
        self._lists = {name: ProcessList(name) for name in (COMPUTE, MPS, GRAPHICS)}
        self._instances: dict[str, InstanceIds] = {}
        self._found: dict[str, tuple[Occupant, ...]] = {}
        self._use: ProcessUse | None = ProcessUse(*clocks)
        self._shares: dict[int, float] | None = None
        self._names = ProcessNames()

    def read(self, handle: Any) -> None:
        """Read the lists that are due in this round. Raises LibraryGone, DeviceGone."""
        turn = self._round + self._phase
        first = self._round == 0
        self._round += 1
        if first or turn % self._rounds == 0:
            self._list(COMPUTE, handle)
            self._names.keep({occupant.pid for occupant in self._all})
            if any(self._found.values()):
                self._share(handle)
        if first or turn % self._slow_rounds == 0:
            self._list(MPS, handle)
            self._list(GRAPHICS, handle)

    def of_gpu(self, instances: Iterable[InstanceIds] = ()) -> tuple[DeviceProcess, ...]:
        """Return the processes on the GPU outside of these instances."""
        instance_ids = set(instances)
        return self._describe(o for o in self._all if _ids_of(o) not in instance_ids)

    def of_instance(self, ids: InstanceIds) -> tuple[DeviceProcess, ...]:
        return self._describe(o for o in self._all if _ids_of(o) == ids)

    def read_instance(self, handle: Any, ids: InstanceIds) -> None:
        """Read the list of one MIG device, if the GPU's own is not permitted."""
        name = f"{COMPUTE} {ids}"
        process_list = self._lists.get(name) or ProcessList(COMPUTE)
        self._lists[name] = process_list
        self._instances[name] = ids
        self._list(name, handle)
        # The list of a MIG device contains only its own processes.
        found = self._found.get(name, ())
        self._found[name] = tuple(Occupant(o.pid, o.memory_bytes, *ids) for o in found)

    def keep_instances(self, instance_ids: Iterable[InstanceIds]) -> None:
        """Drop the lists of removed instances."""
        kept = set(instance_ids)
        for name, ids in tuple(self._instances.items()):
            if ids not in kept:
                del self._instances[name]
                self._lists.pop(name, None)
                self._found.pop(name, None)

    @property
    def _all(self) -> Iterable[Occupant]:
        return (occupant for found in self._found.values() for occupant in found)

    def _describe(self, occupants: Iterable[Occupant]) -> tuple[DeviceProcess, ...]:
        return describe(occupants, self._shares, self._names)

    def _list(self, name: str, handle: Any) -> None:
        process_list = self._lists.get(name)
        if process_list is None:
            return
        self._found.pop(name, None)
        try:
            self._found[name] = self._costs.measure("processes", process_list.read, handle)
        except pynvml.NVMLError as error:
            meaning = classify(error)
            if meaning in _FINAL:
                del self._lists[name]
                self.by_instance = self.by_instance or name == COMPUTE

    def _share(self, handle: Any) -> None:
        if self._use is None:
            return
        self._shares = None
        try:
            self._shares = self._costs.measure("process_utilization", self._use.read, handle)
        except pynvml.NVMLError as error:
            if classify(error) in _FINAL:
                self._use = None


def _ids_of(occupant: Occupant) -> InstanceIds:
    return (occupant.gpu_instance, occupant.compute_instance)
