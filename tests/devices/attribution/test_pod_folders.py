"""Whose the node's pods are, from a folder as the kubelet makes it, and what is refused there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.devices.recording import RecordingSink
from warpwatch_devices.attribution import pod_folders
from warpwatch_devices.attribution.origin import OriginError
from warpwatch_devices.attribution.pod_folders import PodFoldersOrigin, folder_of
from warpwatch_devices.attribution.source import Asker
from warpwatch_telemetry.attribution import Pod

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


@pytest.mark.parametrize(
    "name",
    [
        f"team_{TRAINING}",
        f"a_b_c_{TRAINING}",
        f"Team_train_{TRAINING}",
        f"-team_train_{TRAINING}",
        f"{'a' * 64}_train_{TRAINING}",
        f"team\n_train_{TRAINING}",
        f"team_train_{TRAINING}\n",
        f"team_train_{TRAINING.upper()}",
        "team_train_0b9f7a52",
    ],
)
def test_other_names_are_no_pods(tmp_path: Path, name: str) -> None:
    (tmp_path / f"kube-system_etcd-node_{STATIC}").mkdir()
    (tmp_path / name).mkdir()
    # Nor are links and files.
    (tmp_path / f"team_train_{TRAINING}").symlink_to(tmp_path)
    (tmp_path / f"other_train_{TRAINING}").touch()
    assert set(read(tmp_path)) == {STATIC}


def test_a_folder_too_large_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OriginError, match="No such file"):
        read(tmp_path / "none")
    with pytest.raises(OriginError, match="no pod has a folder there"):
        read(tmp_path)
    monkeypatch.setattr(pod_folders, "MAX_PODS", 1)
    (tmp_path / f"team_train_{TRAINING}").mkdir()
    assert set(read(tmp_path)) == {TRAINING}
    (tmp_path / f"kube-system_etcd-node_{STATIC}").mkdir()
    with pytest.raises(OriginError, match="more than 1"):
        read(tmp_path)


def test_it_is_asked_where_there_is_no_device(tmp_path: Path) -> None:
    (tmp_path / f"team_train_{TRAINING}").mkdir()
    sink = RecordingSink()
    Asker(PodFoldersOrigin(tmp_path), 0.0, tuple, sink, lambda *reported: None).step()
    assert [attribution.origin for attribution in sink.attributions] == ["pod_logs"]


def test_which_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_folders, "DEFAULT_FOLDER", tmp_path / "pods")
    assert folder_of("auto") is None
    (tmp_path / "pods").mkdir()
    assert folder_of("auto") is None
    (tmp_path / "pods" / f"team_train_{TRAINING}").mkdir()
    assert folder_of("auto") == tmp_path / "pods"
    assert folder_of("off") is None
    assert folder_of("/elsewhere") == Path("/elsewhere")
