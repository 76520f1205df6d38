"""Job ids from a folder that a prolog fills, and what is refused there."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.devices.attribution.gpus import GPU_0, GPU_1, MIG_7, node
from warpwatch_devices.attribution.origin import OriginAnswer, OriginError
from warpwatch_devices.attribution.slurm_folder import SlurmFolderOrigin
from warpwatch_telemetry.attribution import SlurmJob


def read(folder: Path) -> OriginAnswer:
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
    reading = read(tmp_path)
    assert jobs(reading) == {GPU_0: ("1234", "1235_7"), GPU_1: ("88+1",), MIG_7: ("99.server",)}
    assert reading.refused == frozenset()


def test_a_line_may_say_whose_the_job_is_and_no_file_that_none_runs(tmp_path: Path) -> None:
    assert jobs(read(tmp_path)) == {}
    (tmp_path / GPU_0).write_text("4711 user=ann account=vision partition=a3-mega\n")
    (attribution,) = read(tmp_path).attributions
    assert attribution.slurm_jobs == {GPU_0: (SlurmJob("4711", "ann", "vision", "a3-mega"),)}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"12\n" * 5000, "more than 4096 bytes"),
        (b"".join(b"%d\n" % n for n in range(65)), "more than 64 jobs"),
        (b'12"} 1\n', "something else"),
        (b"12\n\xff\xfe\n", "something else"),
        (b"12\x00\n", "something else"),
        (b"root:x:0:0:root:/root:/bin/bash\n", "something else"),
        (b"1" * 65, "something else"),
        (b"12 user=a id=13\n", "something else"),
        (b'12 user="root"\n', "something else"),
    ],
)
def test_absurd_content_is_refused_as_a_whole(tmp_path: Path, text: bytes, why: str) -> None:
    (tmp_path / GPU_0).write_bytes(text)
    (tmp_path / GPU_1).write_text("5\n")
    reading = read(tmp_path)
    assert jobs(reading) == {GPU_1: ("5",)}
    (refused,) = reading.refused
    assert refused.startswith(GPU_0)
    assert why in refused


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("1\n")
    (tmp_path / GPU_0).symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "0")
    (tmp_path / "1").mkdir()
    reading = read(tmp_path)
    assert jobs(reading) == {}
    assert len(reading.refused) == 3


def test_a_missing_folder_is_a_failure(tmp_path: Path) -> None:
    with pytest.raises(OriginError, match="No such file"):
        read(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(OriginError, match="Not a directory"):
        read(tmp_path / "file")
