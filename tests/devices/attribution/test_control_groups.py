"""Texts of /proc/<pid>/cgroup as they are found on nodes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpwatch_devices.attribution.control_groups import owner_of, read_owner
from warpwatch_telemetry.attribution import SlurmJob

UID = "099b88fb-2a99-45ad-af94-d91eb81a87e9"
UNDERSCORED = UID.replace("-", "_")
ID = "0bc5eac79e3ae7a0c2651f14722aa10fa333eb2325c2ca97da33aa284cda81b0"
STATIC = "5dbc1f7cf9ccbf2cbc53bf2f0f4e0ec1"


@pytest.mark.parametrize(
    ("text", "pod_uid", "container_id"),
    [
        (
            f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UNDERSCORED}"
            f".slice/cri-containerd-{ID}.scope\n",
            UID,
            ID,
        ),
        (f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{ID}.scope\n", UID, ID),
        (
            f"0::/kubepods.slice/kubepods-pod{UNDERSCORED}.slice/crio-{ID}.scope/container\n",
            UID,
            ID,
        ),
        (f"0::/kubepods/besteffort/pod{UID}/{ID}\n", UID, ID),
        (f"0::/kubepods/pod{STATIC}/{ID}\n", STATIC, ID),
        (f"0::/../../pod{UID}/{ID}\n", UID, ID),
        (f"0::/../cri-containerd-{ID}.scope\n", "", ID),
        (
            f"12:memory:/kubepods/burstable/pod{UID}/{ID}\n"
            f"11:cpu,cpuacct:/kubepods/burstable/pod{UID}/{ID}\n"
            "1:name=systemd:/kubepods/burstable\n0::/\n",
            UID,
            ID,
        ),
        (
            "4:devices:/\n"
            "3:memory:/system.slice/containerd.service/kubepods-besteffort-"
            f"pod{UNDERSCORED}.slice:cri-containerd:{ID}\n",
            UID,
            ID,
        ),
        (f"0::/system.slice/docker-{ID}.scope\n", "", ID),
        (f"9:memory:/docker/{ID}\n", "", ID),
        (f"0::/machine.slice/libpod-{ID}.scope/container\n", "", ID),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", "", ""),
        ("0::/kubepods.slice/kubepods-burstable.slice\n", "", ""),
        ("0::/podman.slice/pod-of-mine.scope\n", "", ""),
        ("", "", ""),
        ("nonsense\n::\n0:\n", "", ""),
    ],
)
def test_pods_and_containers(text: str, pod_uid: str, container_id: str) -> None:
    owner = owner_of(text, "python")
    assert (owner.pod_uid, owner.container_id) == (pod_uid, container_id)
    assert (owner.name, owner.slurm) == ("python", None)


@pytest.mark.parametrize(
    ("text", "job"),
    [
        ("0::/system.slice/slurmstepd.scope/job_1392969/step_0/user/task_0\n", "1392969"),
        ("0::/system.slice/gpu01_slurmstepd.scope/job_7/step_batch/user/task_special\n", "7"),
        ("10:devices:/slurm/uid_2101171/job_280678/step_interactive/task_0\n0::/\n", "280678"),
        ("5:cpuset:/slurm_gpu01/uid_1000/job_42/step_batch\n", "42"),
        ("0::/system.slice/slurmstepd.scope/sD2JHDQ3CHX000/step_0\n", "sD2JHDQ3CHX000"),
        ("0::/system.slice/slurmstepd.scope/system\n", ""),
        ("0::/user.slice/job_12/run\n", ""),
        ("0::/system.slice/slurmstepd.scope/job_x/step_0\n", ""),
        ("0::/system.slice/slurmd.service\n", ""),
    ],
)
def test_slurm_jobs(text: str, job: str) -> None:
    found = owner_of(text).slurm
    assert (found.id if found else "") == job


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
def test_a_job_of_slurm_is_described_by_its_processs_environment(
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
