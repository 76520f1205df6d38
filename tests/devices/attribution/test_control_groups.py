"""Owners and Slurm jobs of processes on devices, from the texts of /proc/<pid>/cgroup."""

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases as tables
from tests.devices.attribution.gpus import GPU_0, GPU_1, sample
from warpwatch_devices.attribution.control_groups import DeviceProcessesOrigin, owner_of, read_owner
from warpwatch_telemetry.samples import ProcessOwner, SlurmJob

CASES = tables(__file__)
CGROUPS = CASES.pop("cgroups")


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


def test_this_process_can_be_read_and_a_gone_one_cannot():
    own = read_owner(os.getpid(), "pytest")
    assert own.name == "pytest"
    assert read_owner(2**22 + 1, "gone") is None


def read(pid: int, name: str) -> ProcessOwner | None:
    return owner_of(CGROUPS[pid], name) if pid in CGROUPS else None


@pytest.mark.parametrize("readings", CASES.values(), ids=CASES)
def test_processes_of_devices_have_owners_and_devices_the_jobs_of_slurm(
    readings: list[dict[str, Any]],
) -> None:
    asked = DeviceProcessesOrigin(
        slurm=readings[0].get("slurm", True),
        read=read,
        host_processes=lambda: not readings[0].get("blind"),
    )
    for case in readings:
        samples = (sample(GPU_0, 0, *case["gpus"][0]), sample(GPU_1, 1, *case["gpus"][1]))
        answer = asked.read(iter(samples), 1000.0)
        said: dict[str, Any] = {}
        for one in answer.attributions:
            owners = one.processes.items()
            jobs = {
                f"GPU-{(GPU_0, GPU_1).index(uuid)}": " ".join(job.id for job in of)
                for uuid, of in one.slurm_jobs.items()
            }
            said[one.origin] = (
                jobs
                if one.origin == "slurm"
                else {
                    pid: f"{of.name} {of.pod_uid} {of.container_id[:1]}"
                    + (f" {of.slurm.id}" if of.slurm else "")
                    for pid, of in owners
                }
            )
            assert one.time == 1000.0
        assert said == case["said"]


@given(st.text())
def test_no_text_makes_it_raise(text):
    assert owner_of(text).container_id == "" or len(owner_of(text).container_id) == 64
