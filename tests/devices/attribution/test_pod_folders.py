"""Pods and job ids from folders as a kubelet and a prolog make them, and what is refused there."""

import os
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

from tests.cases import cases
from tests.devices.attribution.gpus import GPU_0, GPU_1, MIG_7, node
from warpwatch_devices.attribution.folders import PodFoldersOrigin, SlurmFolderOrigin
from warpwatch_devices.source import OriginError
from warpwatch_telemetry.samples import Pod

CASES = cases(__file__)


def read(folder: Path) -> dict[str, Pod]:
    (attribution,) = PodFoldersOrigin(folder).read((), 1000.0).attributions
    assert (attribution.origin, attribution.time) == ("pod_logs", 1000.0)
    return dict(attribution.pods)


@pytest.mark.parametrize("case", CASES["pods"])
def test_the_name_of_a_folder_says_namespace_and_name_of_the_pod(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    for name in case["names"]:
        if name.endswith("@"):
            (tmp_path / name[:-1]).symlink_to(tmp_path)
        else:
            (tmp_path / name.rstrip("!")).touch() if "!" in name else (tmp_path / name).mkdir()
    if isinstance(case["said"], dict):
        assert read(tmp_path) == {uid: Pod(*names) for uid, names in case["said"].items()}
    else:
        with pytest.raises(OriginError, match=case["said"]):
            read(tmp_path)


UUIDS = {"{0}": GPU_0, "{1}": GPU_1, "{7}": MIG_7}


def whole(text: str) -> str:
    return reduce(lambda done, name: done.replace(name, UUIDS[name]), UUIDS, text)


def read_jobs(folder: Path) -> tuple[dict[str, str], frozenset[str]]:
    answer = SlurmFolderOrigin(folder).read(node(), 1000.0)
    (attribution,) = answer.attributions
    assert (attribution.origin, attribution.time) == ("slurm", 1000.0)
    jobs = attribution.slurm_jobs.items()
    return {
        uuid: " ".join("/".join(one).rstrip("/") for one in of) for uuid, of in jobs
    }, answer.refused


@pytest.mark.parametrize("case", CASES["jobs"])
def test_files_named_by_uuid_or_place_hold_jobs_or_are_refused_as_a_whole(
    tmp_path: Path, case: dict[str, Any]
) -> None:
    for name, text in case["files"].items():
        path = tmp_path / whole(name)
        if text == "@":
            path.symlink_to(tmp_path / "secret")
        elif text == "|":
            os.mkfifo(path)
        elif text == "/":
            path.mkdir()
        else:
            path.write_text(text, "latin-1")
    descriptors = len(os.listdir("/proc/self/fd"))
    jobs, refused = read_jobs(tmp_path)
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert jobs == {whole(name): said for name, said in case["said"].items()}
    assert refused == {whole(text) for text in case.get("refused", ())}


def test_files_and_their_jobs_are_bounded(tmp_path: Path) -> None:
    most = [f"{n:063}" for n in range(64)]
    # The last byte that fits is in it.
    for text, why in (("\n" * 4097, "4096 bytes"), ("\n".join(map(str, range(65))), "64 jobs")):
        (tmp_path / GPU_0).write_text(text)
        (tmp_path / GPU_1).write_text("\n".join(most) + "\n")
        refused = frozenset({f"{GPU_0}: more than {why}"})
        assert read_jobs(tmp_path) == ({GPU_1: " ".join(most)}, refused)


def test_a_missing_folder_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(OriginError, match="No such file"):
        read_jobs(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(OriginError, match="Not a directory"):
        read_jobs(tmp_path / "file")
