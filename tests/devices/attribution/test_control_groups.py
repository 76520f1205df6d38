"""Texts of /proc/<pid>/cgroup as they are found on nodes, in golden/control_groups.txt."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.devices.conftest import Cases
from warpwatch_devices.attribution.control_groups import owner_of, read_owner
from warpwatch_telemetry.attribution import ProcessOwner, SlurmJob

UID = "099b88fb-2a99-45ad-af94-d91eb81a87e9"
UNDERSCORED = UID.replace("-", "_")
ID = "0bc5eac79e3ae7a0c2651f14722aa10fa333eb2325c2ca97da33aa284cda81b0"
STATIC = "5dbc1f7cf9ccbf2cbc53bf2f0f4e0ec1"


def test_pods_containers_and_slurm_jobs_of_every_kind(cases: Cases) -> None:
    cases("control_groups.txt", lambda text: owner_of(text, "python"))
    assert owner_of("") == ProcessOwner("")


@pytest.mark.parametrize(
    ("folder", "environment", "expected"),
    [
        ("sD2JHDQ3CHX000", b"SLURM_JOB_ID=42\0SLURM_JOB_USER=ann\0", SlurmJob("42", "ann")),
        ("sD2JHDQ3CHX000", b"HOME=/root\0", SlurmJob("sD2JHDQ3CHX000")),
        (
            "job_42",
            b"SLURM_JOB_ID=42\0SLURM_JOB_USER=ann\0SLURM_JOB_ACCOUNT=vision\0"
            b"SLURM_JOB_PARTITION=a3\0",
            SlurmJob("42", "ann", "vision", "a3"),
        ),
        # Another's id: then nothing of it is believed.
        ("job_42", b"SLURM_JOB_ID=7\0SLURM_JOB_USER=root\0", SlurmJob("42")),
        ("job_42", b'SLURM_JOB_ID=42\0SLURM_JOB_USER=a"b\0', SlurmJob("42")),
    ],
)
def test_a_slurm_job_is_its_environment(
    tmp_path: Path, folder: str, environment: bytes, expected: SlurmJob
) -> None:
    (tmp_path / "7").mkdir()
    path = f"0::/system.slice/slurmstepd.scope/{folder}/step_0/user/task_0\n"
    (tmp_path / "7/cgroup").write_text(path)
    (tmp_path / "7/environ").write_bytes(environment)
    owner = read_owner(7, "python", tmp_path)
    assert owner is not None
    assert owner.slurm == expected


def test_a_container_in_a_container_is_the_inner_one() -> None:
    inner = "f" * 64
    text = f"0::/system.slice/docker-{ID}.scope/kubelet/kubepods/pod{UID}/{inner}\n"
    assert (owner_of(text).pod_uid, owner_of(text).container_id) == (UID, inner)


@given(st.text())
def test_no_text_makes_it_raise(text: str) -> None:
    assert owner_of(text).container_id == "" or len(owner_of(text).container_id) == 64


def test_this_process_can_be_read_and_a_gone_one_cannot() -> None:
    own = read_owner(os.getpid(), "pytest")
    assert own is not None
    assert own.name == "pytest"
    assert read_owner(2**22 + 1, "gone") is None
