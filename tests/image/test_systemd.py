"""The units of examples/systemd: what systemd, the kernel and the daemon make of them."""

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.loop.node import loop_node, poll
from tests.loop.programs import STEPPING
from tests.waiting import DEADLINE_S

FOLDER = Path(__file__).resolve().parents[2] / "examples/systemd"
OTHER_USER = 1234


def setting(unit: str, name: str) -> str:
    lines = (FOLDER / unit).read_text().splitlines()
    (value,) = [line.partition("=")[2] for line in lines if line.startswith(f"{name}=")]
    return value


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_knows_every_line_of_the_units(tmp_path: Path) -> None:
    for name in ("warpwatch.service", "warpwatch.socket", "run-warpwatch.mount"):
        text = (FOLDER / name).read_text()
        # It looks whether there is such a program.
        (tmp_path / name).write_text(text.replace("/opt/warpwatch/bin/warpwatch", "/bin/true"))
    units = [str(path) for path in tmp_path.iterdir()]
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(os.getuid() != 0, reason="only root mounts")
def test_the_rendezvous_folder_has_a_size_of_its_own(tmp_path: Path) -> None:
    assert setting("run-warpwatch.mount", "Where") == "/run/warpwatch"
    options = setting("run-warpwatch.mount", "Options")
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)]
    done = subprocess.run(mount, capture_output=True, text=True, timeout=DEADLINE_S)
    if "permission denied" in done.stderr:
        pytest.skip("root may not mount here")
    assert (done.returncode, done.stderr) == (0, "")
    try:
        found = os.statvfs(tmp_path)
        assert (found.f_blocks * found.f_frsize, found.f_files) == (256 * 2**20, 64 * 2**10)
        assert tmp_path.stat().st_mode & 0o777 == 0o755
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True, timeout=DEADLINE_S)


@pytest.mark.skipif(os.getuid() != 0, reason="only root is a daemon of several users")
def test_with_the_units_umask_a_user_is_captured_and_reads_nothing_of_the_store(open_path):
    before = os.umask(int(setting("warpwatch.service", "UMask"), 8))
    try:
        with loop_node(open_path) as node:
            node.start_daemon()
            os.umask(before)
            node.start_rank(0, STEPPING, "0.02", str(OTHER_USER), world_size=1)
            poll(lambda: node.get("ranks"), "the rank reports")
            asked = {"job": "stepping", "kind": "stacks"}
            assert node.http.post("/api/v1/captures", json=asked).status_code == 202

            def complete() -> Any:
                return [c for c in node.get("captures") if c["outcome"] == "complete"]

            poll(complete, "the stacks are stored")
    finally:
        os.umask(before)
    store = open_path / "captures"
    assert len(list(store.rglob("rank0.stacks.json"))) == 1
    looked = subprocess.run(
        ["ls", str(store)], user=OTHER_USER, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert (looked.stdout, "Permission denied" in looked.stderr) == ("", True)
