"""One reading of a source at one time; immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from warpwatch_telemetry.metric import SeriesKey

# The reason of a fleet's agent before the first request.
NOT_ASKED = "not asked yet"


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU or MIG instance. Its key is the UUID, never the index."""

    uuid: str
    index: int
    name: str
    gpu_instance: str = ""
    profile: str = ""
    # Its description, which seldom changes: driver_version, pci_bus_id, vbios_version, serial, …
    info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on a device. ``name`` is the executable's, never its command line.

    ``memory_bytes`` and ``sm_ratio`` (share of SM time, 0 to 1) may be None: unknown.
    """

    pid: int
    name: str
    memory_bytes: int | None = None
    sm_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """Values of one device. ``time`` is wall clock in seconds; absent means it could not be read.

    A device that cannot be read has ``up`` False and a ``reason`` (lost, stuck, no_permission,
    reset_required, driver). Its values are those known without asking it, such as XID errors.
    ``source``: its reader; samples of several sources are merged by the catalogue's precedence.
    """

    device: Device
    time: float
    values: Mapping[SeriesKey, float] = field(default_factory=dict)
    up: bool = True
    reason: str = ""
    processes: tuple[DeviceProcess, ...] = ()
    source: str = "nvml"


@dataclass(frozen=True, slots=True)
class HostSample:
    """Values of the host at ``time`` (wall clock, seconds), as ``source`` read them.

    ``ports``: the part of ``values`` of each network port, by its name.
    """

    time: float
    values: Mapping[SeriesKey, float]
    source: str = "host"
    ports: Mapping[str, Mapping[SeriesKey, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceHealth:
    """How a source is doing. ``reason`` says in one line what is missing when it is not up.

    lag_s: how far a fleet is behind this agent; None of what an agent reads itself.
    """

    name: str
    up: bool
    reason: str = ""
    duration_s: float = 0.0
    errors: int = 0
    lag_s: float | None = None


@dataclass(frozen=True, slots=True, order=True)
class Workload:
    """A container that a device is allocated to."""

    namespace: str
    pod: str
    container: str


@dataclass(frozen=True, slots=True)
class Pod:
    namespace: str
    name: str


class SlurmJob(NamedTuple):
    """A job of Slurm, from its prolog, or from its environment, which is a claim."""

    id: str
    user: str = ""
    account: str = ""
    partition: str = ""


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """The owner of a process, from its control groups; unknown parts are empty."""

    name: str
    pod_uid: str = ""
    container_id: str = ""
    slurm: SlurmJob | None = None


@dataclass(frozen=True, slots=True)
class Attribution:
    """The last successful reading of one origin (kubelet, slurm, cgroup, pod_logs).

    ``time``: when it was read (wall clock, seconds). ``workloads`` and ``slurm_jobs`` are by device
    UUID, ``processes`` by host PID, ``pods`` by the pod's UID.
    """

    origin: str
    time: float
    workloads: Mapping[str, tuple[Workload, ...]] = field(default_factory=dict)
    slurm_jobs: Mapping[str, tuple[SlurmJob, ...]] = field(default_factory=dict)
    processes: Mapping[int, ProcessOwner] = field(default_factory=dict)
    pods: Mapping[str, Pod] = field(default_factory=dict)
