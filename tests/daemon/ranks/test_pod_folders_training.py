"""Real trainings in pods that mount only a folder of their own, and captures of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.ranks.pod_node import A, B
from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.programs import SEEDED, STEPPING
from warpwatch_daemon.agent.open_files import ENOUGH

# What a container runtime does with the two mounts of the pod's specification, and its own PIDs.
_MOUNT = """
mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /var/lib || exit 125
mkdir -p /run/warpwatch /var/lib/warpwatch/inbox
mount --bind "$1" /run/warpwatch && mount --bind "$2" /var/lib/warpwatch/inbox || exit 125
shift 2
exec "$@"
"""
_UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_RUN = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"


def kubelet_makes(node: LoopNode, uid: str) -> tuple[Path, Path]:
    """The pod's folder and its inbox."""
    made = node.run_dir / "pods" / uid, node.folder / "inbox" / "pods" / uid
    for path in made:
        path.mkdir()
    return made


def captured(node: LoopNode, job: str, kind: str, ranks: int) -> dict[str, Any]:
    """A capture of the job, after it has ended."""
    poll(lambda: live_ranks(node, job) == ranks, "the ranks")
    answer = node.http.post("/api/v1/captures", json={"job": job, "kind": kind, "steps": 2})
    assert answer.status_code == 202, answer.text

    def ended() -> dict[str, Any] | None:
        (capture,) = node.get("captures")
        return dict(capture) if capture["outcome"] else None

    return dict(poll(ended, "the capture"))


def live_ranks(node: LoopNode, job: str) -> int:
    ranks = node.http.get("/api/v1/ranks").json()["ranks"]
    return sum(rank["job"] == job and (rank["steps_total"] or 0) > 3 for rank in ranks)


def assert_many_files_may_be_open(pid: int) -> None:
    limits = Path(f"/proc/{pid}/limits").read_text()
    (row,) = [line for line in limits.splitlines() if line.startswith("Max open files")]
    soft, hard = (int(n) if n.isdigit() else ENOUGH for n in row.split()[3:5])
    assert soft >= min(hard, ENOUGH)


def test_one_job_in_two_pods_is_captured_together(tmp_path: Path) -> None:
    with loop_node(tmp_path) as node:
        assert_many_files_may_be_open(node.start_daemon().pid)
        for rank, uid in enumerate((A, B)):
            folder, inbox = kubelet_makes(node, uid)
            own = node.rank_environment(rank, 2)
            own |= {"WARPWATCH_DIR": str(folder), "WARPWATCH_INBOX": str(inbox)}
            node.start(f"rank{rank}", ["-c", SEEDED, "100000"], own)
        capture = captured(node, "seeded", "torch", 2)
        assert (capture["outcome"], capture["detail"]) == ("complete", "")
        names = {"rank0.pt.trace.json.gz", "rank1.pt.trace.json.gz"}
        assert names <= set(os.listdir(capture["folder"]))
        for rank, uid in enumerate((A, B)):
            assert node.metric("warpwatch_rank_info", rank=str(rank), pod_uid=uid) == 1
            left = os.listdir(tmp_path / "inbox" / "pods" / uid)
            assert not [name for name in left if "trace" in name]


def test_a_container_with_the_two_mounts_needs_no_variable(tmp_path: Path) -> None:
    if subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    with loop_node(tmp_path) as node:
        node.start_daemon()
        mounts = [str(path) for path in kubelet_makes(node, A)]
        program = [sys.executable, "-c", STEPPING, "-1", "0.02"]
        inside = [*_UNSHARE, "sh", "-c", _MOUNT, "sh", *mounts, *program]
        own = {"RANK": "0", "WORLD_SIZE": "1", "WARPWATCH_ATTACH_INTERVAL_S": "0.2"}
        container = node.start("rank0", ["-c", _RUN, *inside], own)
        poll(lambda: container.poll() is not None or live_ranks(node, "stepping"), "the rank")
        if container.poll() == 125:
            pytest.skip("nothing can be mounted here")
        capture = captured(node, "stepping", "stacks", 1)
        assert capture["outcome"] == "complete", capture
        stacks = json.loads((Path(capture["folder"]) / "rank0.stacks.json").read_text())
        assert stacks["via"] == "helper"
        # The daemon may be killed and come back: the rank is where it was.
        node.kill_daemon()
        node.start_daemon()
        poll(lambda: live_ranks(node, "stepping") == 1, "the rank after the restart")
        assert node.metric("warpwatch_rank_info", rank="0", pod_uid=A) == 1
        assert len(list((node.run_dir / "pods" / A / "ranks").iterdir())) == 1
