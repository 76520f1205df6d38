"""One reading of a source at one time; immutable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from warpwatch_telemetry.metric import SeriesKey

# Why a fleet's agent is not up, until it was asked for the first time.
NOT_ASKED = "not asked yet"


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU or MIG instance. Its key is the UUID, never the index."""

    uuid: str
    index: int
    name: str
    gpu_instance: str = ""
    profile: str = ""
    # What describes it and seldom changes: driver_version, pci_bus_id, vbios_version, serial, …
    info: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on a device. ``name`` is the executable's, never its command line.

    ``memory_bytes`` and ``sm_ratio`` (share of SM time, 0 to 1) are None where not known.
    """

    pid: int
    name: str
    memory_bytes: int | None = None
    sm_ratio: float | None = None


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """Values of one device. ``time`` is wall clock in seconds; absent means it could not be read.

    A device that cannot be read has ``up`` False, a ``reason`` from a closed set (lost, stuck,
    no_permission, reset_required, driver) and only the values that are known without asking it,
    such as its XID errors. ``source`` is who read it: what two sources know of one device is
    merged by the precedence that the catalogue declares.
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

    ``ports``: those of ``values`` that are of a network port, by its name.
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
    """A job of Slurm, and what its prolog (or, a claim, its environment) says of it."""

    id: str
    user: str = ""
    account: str = ""
    partition: str = ""


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """What a process's control groups say of it; empty where they say nothing."""

    name: str
    pod_uid: str = ""
    container_id: str = ""
    slurm: SlurmJob | None = None


@dataclass(frozen=True, slots=True)
class Attribution:
    """What one origin (kubelet, slurm, cgroup, pod_logs) knew when it was last read with success.

    ``time`` is that moment (wall clock, seconds): an origin that is away leaves its last word,
    which grows old. ``workloads`` and ``slurm_jobs`` are by device UUID, ``processes`` by host PID,
    ``pods`` by the pod's UID.
    """

    origin: str
    time: float
    workloads: Mapping[str, tuple[Workload, ...]] = field(default_factory=dict)
    slurm_jobs: Mapping[str, tuple[SlurmJob, ...]] = field(default_factory=dict)
    processes: Mapping[int, ProcessOwner] = field(default_factory=dict)
    pods: Mapping[str, Pod] = field(default_factory=dict)
