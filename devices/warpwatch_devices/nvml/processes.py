"""The processes on a device: their memory, their share of the multiprocessors, their names.

NVML gives host PIDs. Lists are read into a buffer that is kept, so that each is one call.
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
from warpwatch_devices.nvml.buffer import Buffer
from warpwatch_devices.nvml.library import function
from warpwatch_devices.nvml.sample_buffers import NewestSample
from warpwatch_devices.process_tree import sees_host_processes
from warpwatch_telemetry.samples import DeviceProcess

# nvmlProcessInfo_v2_t: pid, usedGpuMemory, gpuInstanceId, computeInstanceId.
_PROCESS = struct.Struct("=I4xQII")
# nvmlProcessUtilizationSample_t: pid, timeStamp (µs), smUtil, memUtil, encUtil, decUtil (per cent).
_USE = struct.Struct("=I4xQIIII")
_NOT_AVAILABLE = 2**64 - 1
# Of the first reading, which gives all that the driver remembers.
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
        """Raises NVMLError."""
        processes = self._buffer.fill(lambda structs, count: self._call(handle, count, structs))
        return tuple(
            Occupant(pid, None if memory == _NOT_AVAILABLE else memory, gi, ci)
            for pid, memory, gi, ci in processes
        )

    def _call(self, *arguments: Any) -> int:
        """Before driver 510 the same list has another version."""
        try:
            return function(self._name + self._version)(*arguments)
        except pynvml.NVMLError_FunctionNotFound:
            if self._version == "_v2":
                raise
            self._version = "_v2"
            return function(self._name + self._version)(*arguments)


class ProcessUse:
    """The share of SM time by process, since the reading before."""

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
        """The mean share (0 to 1) by PID; who is not named has used nothing. Raises NVMLError.

        Nothing new means that no process used the device, unless there was no time for it.
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
        """The mean of what is new: (PID, time in µs, share of SM time in per cent, …) each."""
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
    """Names of executables, asked of the kernel once for each process.

    A PID that has left the device is forgotten, so that its successor is asked for again. Where
    PIDs of the host mean nothing or another process, there are no names.
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
    """The kernel's name of a process; empty where it has ended."""
    return read_text(Path(f"/proc/{pid}/comm")).strip()


def describe(
    occupants: Iterable[Occupant], use: dict[int, float] | None, names: ProcessNames
) -> tuple[DeviceProcess, ...]:
    """Each process once, however many lists it is in. ``use`` is None where it is not known."""
    memory: dict[int, int | None] = {}
    for occupant in occupants:
        if memory.get(occupant.pid) is None:
            memory[occupant.pid] = occupant.memory_bytes
    return tuple(
        DeviceProcess(pid, names.name(pid), bytes_, None if use is None else use.get(pid, 0.0))
        for pid, bytes_ in memory.items()
    )
