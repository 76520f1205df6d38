"""Owners of the processes on devices, and the Slurm jobs that follow from them."""

from __future__ import annotations

import os

from tests.devices.attribution.gpus import GPU_0, GPU_1, sample
from warpwatch_devices.attribution.control_groups import owner_of
from warpwatch_devices.attribution.device_processes import DeviceProcessesOrigin
from warpwatch_devices.attribution.origin import OriginAnswer
from warpwatch_telemetry.attribution import ProcessOwner

POD = "099b88fb-2a99-45ad-af94-d91eb81a87e9"
CGROUPS = {
    10: "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
    11: "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_1\n",
    12: "0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n",
    13: f"0::/kubepods/pod{POD}/{'a' * 64}\n",
    14: "0::/user.slice\n",
}


def read(pid: int, name: str) -> ProcessOwner | None:
    return owner_of(CGROUPS[pid], name) if pid in CGROUPS else None


def origin(*, slurm: bool = True) -> DeviceProcessesOrigin:
    return DeviceProcessesOrigin(slurm=slurm, read=read, host_processes=lambda: True)


def test_owners_of_all_processes_that_can_be_read() -> None:
    samples = (sample(GPU_0, 0, 13, 99), sample(GPU_1, 1, 14, 0))
    (attribution,) = origin().read(samples, 1000.0).attributions
    assert (attribution.origin, attribution.time) == ("cgroup", 1000.0)
    assert attribution.processes == {
        13: ProcessOwner("python", POD, "a" * 64),
        14: ProcessOwner("python"),
    }


def test_jobs_of_slurm_by_device() -> None:
    samples = (sample(GPU_0, 0, 10, 12), sample(GPU_1, 1, 10, 11, 13))
    _, slurm = origin().read(samples, 1000.0).attributions
    assert (slurm.origin, slurm.time) == ("slurm", 1000.0)
    jobs = {uuid: [job.id for job in of] for uuid, of in slurm.slurm_jobs.items()}
    assert jobs == {GPU_0: ["12", "7"], GPU_1: ["7"]}


def test_the_end_of_the_last_job_is_reported_but_no_slurm_where_none_ran() -> None:
    asked = origin()
    idle, busy = (sample(GPU_0, 0, 14),), (sample(GPU_0, 0, 10),)
    assert [a.origin for a in asked.read(idle, 1.0).attributions] == ["cgroup"]
    assert [a.origin for a in asked.read(busy, 2.0).attributions] == ["cgroup", "slurm"]
    _, slurm = asked.read(idle, 3.0).attributions
    assert slurm.slurm_jobs == {}


def test_slurm_may_be_off() -> None:
    (attribution,) = origin(slurm=False).read((sample(GPU_0, 0, 10),), 1.0).attributions
    assert attribution.origin == "cgroup"


def test_nothing_is_said_of_processes_of_another_pid_namespace() -> None:
    blind = DeviceProcessesOrigin(host_processes=lambda: False)
    assert blind.read((sample(GPU_0, 0, os.getpid()),), 1.0) == OriginAnswer()
