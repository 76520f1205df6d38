"""A full disk: nothing crashes, captures are refused with a reason and counted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loop.node import loop_node, poll
from tests.loop.programs import STEPPING


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small tmpfs cannot be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_store_without_space_refuses_captures_and_everything_else_goes_on(
    tmp_path: Path,
) -> None:
    with (
        small_disk(tmp_path / "disk", "1m") as disk,
        loop_node(tmp_path, store={"url": disk.as_uri()}) as node,
    ):
        (disk / "filler").write_bytes(bytes(1 << 20))
        node.start_daemon()
        node.start_rank(0, STEPPING, "-1", "0.01", world_size=1)
        poll(lambda: node.get("ranks"), 20, "the rank reports")
        answer = node.http.post("/api/v1/captures", json={"job": "stepping", "kind": "stacks"})
        assert answer.status_code in (409, 503, 507)
        assert answer.json()["error"]["reason"] == "refused_disk"
        labels = {"kind": "stacks", "trigger": "manual", "outcome": "refused_disk"}
        assert node.metric("warpwatch_captures_total", **labels) == 1
        assert "Traceback" not in node.log("daemon")


def test_a_full_rendezvous_and_a_full_log_are_counted_and_named(tmp_path: Path) -> None:
    with (
        small_disk(tmp_path / "disk", "64k") as disk,
        loop_node(tmp_path, exporters={"jsonl": {"path": str(disk / "log.jsonl")}}) as node,
    ):
        node.start_daemon()
        (disk / "filler").write_bytes(b"")
        with contextlib.suppress(OSError), (disk / "filler").open("wb") as filler:
            filler.write(bytes(1 << 20))
        poll(lambda: node.metric("warpwatch_jsonl_errors_total"), 20, "the error is counted")
        time.sleep(1)
        assert node.http.get("/healthz").status_code == 200
        lines = [line for line in node.log("daemon").splitlines() if "telemetry log" in line]
        assert len(lines) == 1
