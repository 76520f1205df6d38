"""Owners and Slurm jobs of processes on devices, from the texts of /proc/<pid>/cgroup."""

import os

from hypothesis import given
from hypothesis import strategies as st

from tests.devices.attribution.gpus import GPU_0, GPU_1, sample
from warpwatch_devices.attribution.control_groups import DeviceProcessesOrigin, owner_of, read_owner
from warpwatch_devices.source import OriginAnswer
from warpwatch_telemetry.samples import ProcessOwner, SlurmJob

UID = "099b88fb-2a99-45ad-af94-d91eb81a87e9"
ID = "0bc5eac79e3ae7a0c2651f14722aa10fa333eb2325c2ca97da33aa284cda81b0"
STATIC = "5dbc1f7cf9ccbf2cbc53bf2f0f4e0ec1"


def test_pods_containers_and_slurm_jobs_of_every_kind(cases):
    cases("control_groups.txt", lambda text: owner_of(text, "python"))
    assert owner_of("") == ProcessOwner("")


def test_a_slurm_job_is_its_environment_unless_that_is_anothers(tmp_path, cases):
    (tmp_path / "7").mkdir()

    def job(text: str) -> SlurmJob | None:
        folder, *variables = text.split(" ")
        path = f"0::/system.slice/slurmstepd.scope/{folder}/step_0/user/task_0\n"
        (tmp_path / "7/cgroup").write_bytes(path.encode() + b"1:x:/\xff\n")
        (tmp_path / "7/environ").write_text("".join(f"{one}\0" for one in variables))
        return read_owner(7, "python", tmp_path).slurm

    cases("slurm_jobs.txt", job)


@given(st.text())
def test_no_text_makes_it_raise(text):
    assert owner_of(text).container_id == "" or len(owner_of(text).container_id) == 64


def test_this_process_can_be_read_and_a_gone_one_cannot():
    own = read_owner(os.getpid(), "pytest")
    assert own.name == "pytest"
    assert read_owner(2**22 + 1, "gone") is None


CGROUPS = {
    10: "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_0\n",
    11: "0::/system.slice/slurmstepd.scope/job_7/step_0/user/task_1\n",
    12: "0::/system.slice/slurmstepd.scope/job_12/step_0/user/task_0\n",
    13: f"0::/kubepods/pod{UID}/{'a' * 64}\n",
    14: "0::/user.slice\n",
}


def read(pid: int, name: str) -> ProcessOwner | None:
    return owner_of(CGROUPS[pid], name) if pid in CGROUPS else None


def origin(*, slurm: bool = True) -> DeviceProcessesOrigin:
    return DeviceProcessesOrigin(slurm=slurm, read=read, host_processes=lambda: True)


def test_owners_of_all_processes_that_can_be_read():
    samples = (sample(GPU_0, 0, 13, 99), sample(GPU_1, 1, 14, 0))
    (attribution,) = origin().read(samples, 1000.0).attributions
    assert (attribution.origin, attribution.time) == ("cgroup", 1000.0)
    assert attribution.processes == {
        13: ProcessOwner("python", UID, "a" * 64),
        14: ProcessOwner("python"),
    }
    named = DeviceProcessesOrigin(
        read=lambda _, name: ProcessOwner(name), host_processes=lambda: True
    )
    (many,) = named.read((sample(GPU_0, 0, *range(2000)),), 1.0).attributions
    assert sorted(many.processes) == [*range(1, 1025)]


def test_jobs_of_slurm_by_device():
    samples = (sample(GPU_0, 0, 10, 12), sample(GPU_1, 1, 10, 11, 13))
    _, slurm = origin().read(samples, 1000.0).attributions
    assert (slurm.origin, slurm.time) == ("slurm", 1000.0)
    jobs = {uuid: [job.id for job in of] for uuid, of in slurm.slurm_jobs.items()}
    assert jobs == {GPU_0: ["12", "7"], GPU_1: ["7"]}


def test_the_end_of_the_last_job_is_reported_but_no_slurm_where_none_ran():
    asked = origin()
    idle, busy = (sample(GPU_0, 0, 14),), (sample(GPU_0, 0, 10),)
    assert [a.origin for a in asked.read(idle, 1.0).attributions] == ["cgroup"]
    assert [a.origin for a in asked.read(busy, 2.0).attributions] == ["cgroup", "slurm"]
    _, slurm = asked.read(idle, 3.0).attributions
    assert slurm.slurm_jobs == {}


def test_slurm_may_be_off():
    (attribution,) = origin(slurm=False).read((sample(GPU_0, 0, 10),), 1.0).attributions
    assert attribution.origin == "cgroup"


def test_nothing_is_said_of_processes_of_another_pid_namespace():
    blind = DeviceProcessesOrigin(host_processes=lambda: False)
    assert blind.read((sample(GPU_0, 0, os.getpid()),), 1.0) == OriginAnswer()
