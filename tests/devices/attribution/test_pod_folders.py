"""Pods and job ids from folders as a kubelet and a prolog make them, and what is refused there."""

import os
from pathlib import Path

import pytest

from tests.devices.attribution.gpus import GPU_0, GPU_1, MIG_7, node
from tests.devices.recording import RecordingSink
from warpwatch_devices.attribution import folders
from warpwatch_devices.attribution.folders import PodFoldersOrigin, SlurmFolderOrigin, folder_of
from warpwatch_devices.attribution.source import OriginPoller
from warpwatch_devices.source import OriginAnswer, OriginError
from warpwatch_telemetry.samples import Pod, SlurmJob

TRAINING = "0b9f7a52-6f0c-4c35-9e0a-1d2c3b4a5f60"
STATIC = "8fae0c9d3d1f4a5b6c7d8e9f0a1b2c3d"


def read(folder: Path) -> dict[str, Pod]:
    (attribution,) = PodFoldersOrigin(folder).read((), 1000.0).attributions
    assert (attribution.origin, attribution.time) == ("pod_logs", 1000.0)
    return dict(attribution.pods)


def test_the_name_of_a_folder_says_namespace_and_name_of_the_pod(tmp_path: Path) -> None:
    (tmp_path / f"team-a_train-0.v2_{TRAINING}").mkdir()
    (tmp_path / f"kube-system_etcd-node_{STATIC}").mkdir()
    assert read(tmp_path) == {
        TRAINING: Pod("team-a", "train-0.v2"),
        STATIC: Pod("kube-system", "etcd-node"),
    }


def test_other_names_are_no_pods(tmp_path: Path) -> None:
    (tmp_path / f"kube-system_etcd-node_{STATIC}").mkdir()
    for name in ("team", "a_b_c", "Team_train", "-team_train", "a" * 64 + "_train", "team\n_train"):
        (tmp_path / f"{name}_{TRAINING}").mkdir()
    for uid in (f"{TRAINING}\n", TRAINING.upper(), "0b9f7a52"):
        (tmp_path / f"team_train_{uid}").mkdir()
    # Nor are links and files.
    (tmp_path / f"team_train_{TRAINING}").symlink_to(tmp_path)
    (tmp_path / f"other_train_{TRAINING}").touch()
    assert read(tmp_path) == {STATIC: Pod("kube-system", "etcd-node")}


def test_a_folder_too_large_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OriginError, match="No such file"):
        read(tmp_path / "none")
    with pytest.raises(OriginError, match="no pod has a folder there"):
        read(tmp_path)
    monkeypatch.setattr(folders, "MAX_PODS", 1)
    (tmp_path / f"team_train_{TRAINING}").mkdir()
    assert set(read(tmp_path)) == {TRAINING}
    (tmp_path / f"kube-system_etcd-node_{STATIC}").mkdir()
    with pytest.raises(OriginError, match="more than 1"):
        read(tmp_path)


def test_it_is_asked_where_there_is_no_device(tmp_path: Path) -> None:
    (tmp_path / f"team_train_{TRAINING}").mkdir()
    sink = RecordingSink()
    OriginPoller(PodFoldersOrigin(tmp_path), 0.0, tuple, sink, lambda *reported: None).step()
    assert [attribution.origin for attribution in sink.attributions] == ["pod_logs"]


def test_which_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "DEFAULT_FOLDER", tmp_path / "pods")
    assert folder_of("auto") is None
    (tmp_path / "pods").mkdir()
    assert folder_of("auto") is None
    (tmp_path / "pods" / f"team_train_{TRAINING}").mkdir()
    assert folder_of("auto") == tmp_path / "pods"
    assert folder_of("off") is None
    assert folder_of("/elsewhere") == Path("/elsewhere")


def read_jobs(folder: Path) -> OriginAnswer:
    return SlurmFolderOrigin(folder).read(node(), 1000.0)


def jobs(answer: OriginAnswer) -> dict[str, tuple[str, ...]]:
    (attribution,) = answer.attributions
    assert (attribution.origin, attribution.time) == ("slurm", 1000.0)
    jobs = attribution.slurm_jobs.items()
    return {uuid: tuple(job.id for job in of) for uuid, of in jobs}


def test_files_are_named_by_uuid_or_index(tmp_path: Path) -> None:
    (tmp_path / GPU_0).write_text("1234\n1235_7\n")
    (tmp_path / "0").write_text("1234\n\n")
    (tmp_path / "1").write_text("88+1")
    (tmp_path / "1.7").write_text("99.server\n")
    (tmp_path / "5").write_text("77\n")
    (tmp_path / "README").write_text("Job ids live here!\n")
    descriptors = len(os.listdir("/proc/self/fd"))
    reading = read_jobs(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert jobs(reading) == {GPU_0: ("1234", "1235_7"), GPU_1: ("88+1",), MIG_7: ("99.server",)}
    assert reading.refused == frozenset()


def test_a_line_may_say_whose_the_job_is_and_no_file_that_none_runs(tmp_path: Path) -> None:
    assert jobs(read_jobs(tmp_path)) == {}
    # The second cluster has no accounting, and its users are of a Windows domain.
    for user, account in (("ann", "vision"), (r"DOM\ann", "")):
        (tmp_path / GPU_0).write_text(f"4711 user={user} account={account} partition=a3-mega\n")
        (attribution,) = read_jobs(tmp_path).attributions
        assert attribution.slurm_jobs == {GPU_0: (SlurmJob("4711", user, account, "a3-mega"),)}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"12\n" * 5000, "more than 4096 bytes"),
        (b"".join(b"%d\n" % n for n in range(65)), "more than 64 jobs"),
        (b'12"} 1\n', "holds something else than jobs"),
        (b"12\n\xff\xfe\n", "holds something else than jobs"),
        (b"12\x00\n", "holds something else than jobs"),
        (b"root:x:0:0:root:/root:/bin/bash\n", "holds something else than jobs"),
        (b"1" * 65, "holds something else than jobs"),
        (b"12 user=a id=13\n", "holds something else than jobs"),
        (b'12 user="root"\n', "holds something else than jobs"),
    ],
)
def test_absurd_content_is_refused_as_a_whole(tmp_path: Path, text: bytes, why: str) -> None:
    (tmp_path / GPU_0).write_bytes(text)
    most = tuple(f"{n:063}" for n in range(64))
    (tmp_path / GPU_1).write_text("\n".join(most) + "\n")
    reading = read_jobs(tmp_path)
    assert jobs(reading) == {GPU_1: most}
    assert reading.refused == {f"{GPU_0}: {why}"}


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("1\n")
    (tmp_path / GPU_0).symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "0")
    (tmp_path / "1").mkdir()
    reading = read_jobs(tmp_path)
    assert jobs(reading) == {}
    refused = {"0: no regular file", "1: no regular file"}
    assert reading.refused == refused | {f"{GPU_0}: Too many levels of symbolic links"}


def test_a_missing_folder_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(OriginError, match="No such file"):
        read_jobs(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(OriginError, match="Not a directory"):
        read_jobs(tmp_path / "file")
