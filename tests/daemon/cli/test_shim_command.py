"""`warpwatch shim`: what it copies is a shim that works without anything installed."""

from __future__ import annotations

import os
import subprocess
import sys

from warpwatch_daemon.cli import main


def test_the_copy_is_loaded_by_the_path_that_is_printed(tmp_path, capsys):
    assert main(["shim", str(tmp_path)]) == 0
    path = capsys.readouterr().out.strip()
    assert path == str(tmp_path / "warpwatch/bootstrap")
    environment = {**os.environ, "PYTHONPATH": path, "WARPWATCH": "1"}
    code = "import sitecustomize; print(sitecustomize.__file__)"
    # -S -s: nothing that is installed here is seen, so the copy alone must do.
    done = subprocess.run(
        [sys.executable, "-S", "-s", "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == f"{path}/sitecustomize.py", done.stderr
    assert not list(tmp_path.rglob("__pycache__/*.cpython-*.opt-*"))
    # It can be copied again.
    assert main(["shim", str(tmp_path)]) == 0


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "warpwatch").write_text("no folder")
    assert main(["shim", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"warpwatch shim: cannot copy the shim to {tmp_path}/warpwatch: ")
    assert err.count("\n") == 1
