"""Finds pod, container and Slurm job of a process by its control groups, and those of each device.

A line per hierarchy, ``<id>:<controllers>:<path>``; version 2 has one hierarchy, ``0::<path>``.

    /kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope
    /kubepods/burstable/pod<uid>/<id>
    /system.slice/slurmstepd.scope/job_<id>/step_0/user/task_0     (version 2; <node>_slurmstepd)
    /slurm/uid_<uid>/job_<id>/step_0/task_0                        (version 1; slurm_<node>)
    /system.slice/slurmstepd.scope/<SLUID>/step_0/user/task_0      (from Slurm 26.05 on)

A SLUID is not a job id. The id, user, account and partition are then only in the process's
environment, which the program controls; only that of Slurm's processes is read.

systemd's names have ``_`` for the ``-`` of a UID. Static pods have 32 digits for a UID. In a
container with its own control group namespace, paths outside of it start with ``/..``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from warpwatch_devices.attribution.folders import SLURM_WORD
from warpwatch_devices.processes import gpu_processes, sees_host_processes
from warpwatch_devices.source import AttributionOrigin, OriginAnswer
from warpwatch_telemetry.samples import Attribution, DeviceSample, ProcessOwner, SlurmJob

_PROC = Path("/proc")
# More hierarchies and deeper paths than any kernel has.
_MAX_BYTES = 64 * 1024

_POD = re.compile(
    r"(?:^|[/-])pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})(?=[./:]|$)"
)
# Behind a runtime's prefix, a slash, or the colon of containerd under systemd without a scope.
_CONTAINER = re.compile(r"(?:[/:]|[/:](?:[a-z]+-)+)([0-9a-f]{64})(?:\.scope)?(?=/|$)")
_SLURM = re.compile(
    r"(?:/(?:[^/]+_)?slurmstepd\.scope|/slurm(?:_[^/]+)?(?:/uid_[0-9]+)?)/(?:job_([0-9]{1,20})|(s[0-9A-Z]{8,20}))"
    r"(?=/|$)",
    re.ASCII,
)
_SLURM_VARIABLES = ("JOB_ID", "JOB_USER", "JOB_ACCOUNT", "JOB_PARTITION")


def owner_of(text: str, name: str = "") -> ProcessOwner:
    """Return the owner of a process called ``name`` by the text of its /proc/<pid>/cgroup."""
    paths = list(_paths(text))
    pod_uid = _first(_POD, paths).replace("_", "-")
    slurm = next((found[-1] for path in paths if (found := _SLURM.findall(path))), None)
    job = SlurmJob(slurm[0] or slurm[1]) if slurm else None
    return ProcessOwner(name, pod_uid, _first(_CONTAINER, paths), job)


def _paths(text: str) -> Iterator[str]:
    for line in text.splitlines():
        _, _, path = line.partition(":")[2].partition(":")
        if path:
            yield path


def _first(pattern: re.Pattern[str], paths: list[str]) -> str:
    """Return the innermost match of the first path that has one: pods may be nested."""
    for path in paths:
        found = pattern.findall(path)
        if found:
            return str(found[-1])
    return ""


def read_owner(pid: int, name: str, proc: Path = _PROC) -> ProcessOwner | None:
    """Return the owner, or None if the process has exited or may not be read."""
    try:
        with open(proc / str(pid) / "cgroup", "rb") as file:
            text = file.read(_MAX_BYTES)
    except OSError:
        return None
    owner = owner_of(text.decode("utf-8", "replace"), name)
    if owner.slurm is None:
        return owner
    return replace(owner, slurm=_described(owner.slurm, _environment(proc / str(pid))))


def _environment(process: Path) -> dict[str, str]:
    """Return Slurm's variables, or nothing if the environment may not be read."""
    try:
        with open(process / "environ", "rb") as file:
            variables = file.read(_MAX_BYTES).split(b"\0")
    except OSError:
        return {}
    pairs = (line.decode("ascii", "replace").partition("=") for line in variables)
    return {name: word for name, _, word in pairs if SLURM_WORD.fullmatch(word)}


def _described(job: SlurmJob, environment: dict[str, str]) -> SlurmJob:
    told = SlurmJob(*(environment.get(f"SLURM_{name}", "") for name in _SLURM_VARIABLES))
    if job.id.isdecimal() and told.id != job.id:
        return job
    return told if told.id else job


# A GPU has about ten processes at most; more are ignored.
MAX_PROCESSES = 1024


class DeviceProcessesOrigin(AttributionOrigin):
    """The owners of the processes on the devices, and with ``slurm`` the jobs of each device."""

    name = "cgroup"
    needs_devices = True

    def __init__(
        self,
        *,
        slurm: bool = True,
        read: Callable[[int, str], ProcessOwner | None] = read_owner,
        host_processes: Callable[[], bool] = sees_host_processes,
    ) -> None:
        self._slurm = slurm
        self._had_jobs = False
        self._read = read
        self._host_processes = host_processes

    def read(self, samples: Iterable[DeviceSample], now: float) -> OriginAnswer:
        if not self._host_processes():
            return OriginAnswer()
        samples = tuple(samples)
        owners = self._owners(samples)
        found = [Attribution(self.name, now, processes=owners)]
        jobs = _slurm_jobs(samples, owners) if self._slurm else {}
        # A node on which Slurm has never run has no such origin.
        self._had_jobs = self._had_jobs or bool(jobs)
        if self._had_jobs:
            found.append(Attribution("slurm", now, slurm_jobs=jobs))
        return OriginAnswer(tuple(found))

    def _owners(self, samples: tuple[DeviceSample, ...]) -> dict[int, ProcessOwner]:
        names = gpu_processes(samples, MAX_PROCESSES)
        owners = ((pid, self._read(pid, name)) for pid, name in names.items())
        return {pid: owner for pid, owner in owners if owner is not None}


def _slurm_jobs(
    samples: tuple[DeviceSample, ...], owners: Mapping[int, ProcessOwner]
) -> dict[str, tuple[SlurmJob, ...]]:
    jobs: dict[str, set[SlurmJob]] = {}
    for sample in samples:
        for process in sample.processes:
            owner = owners.get(process.pid)
            if owner is not None and owner.slurm is not None:
                jobs.setdefault(sample.device.uuid, set()).add(owner.slurm)
    return {uuid: tuple(sorted(found)) for uuid, found in jobs.items()}
