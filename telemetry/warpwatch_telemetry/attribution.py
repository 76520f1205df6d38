"""Whose work runs: pods, containers on devices, batch jobs, and the processes themselves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple


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
