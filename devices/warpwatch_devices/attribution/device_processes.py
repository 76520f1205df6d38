"""Owners of the processes on the devices, and through them the Slurm jobs of each device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from warpwatch_devices.attribution.control_groups import read_owner
from warpwatch_devices.attribution.origin import AttributionOrigin, OriginAnswer
from warpwatch_devices.process_tree import sees_host_processes
from warpwatch_devices.processes import gpu_processes
from warpwatch_telemetry.samples import Attribution, DeviceSample, ProcessOwner, SlurmJob

# A GPU has some ten processes at most; what is beyond this is not looked at.
MAX_PROCESSES = 1024


class DeviceProcessesOrigin(AttributionOrigin):
    """``slurm``: whether the jobs are wanted as well."""

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
        # Where Slurm never ran, it is no origin.
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
