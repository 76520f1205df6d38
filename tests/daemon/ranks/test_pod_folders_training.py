"""A real job in two pods that mount only a folder of their own, and a capture of it."""

import json
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.daemon.ranks.sources import A, B
from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.programs import STEPPING
from tests.waiting import eventually
from warpwatch_daemon.ranks.counts import FILE

# Enter the two mounts of the pod's specification, and PIDs of its own, as a container runtime does.
_MOUNT = """
mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /var/lib || exit 125
mkdir -p /run/warpwatch /var/lib/warpwatch/inbox
mount --bind "$1" /run/warpwatch && mount --bind "$2" /var/lib/warpwatch/inbox || exit 125
shift 2
exec "$@"
"""
_UNSHARE = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
_RUN = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
_PROGRAM = ["-c", STEPPING, "0.02"]


def kubelet_makes(node: LoopNode, uid: str) -> list[str]:
    """The pod's folder and its inbox."""
    made = [node.run_dir / "pods" / uid, node.folder / "inbox" / "pods" / uid]
    for path in made:
        eventually(path.parent.exists)
        path.mkdir()
    return [str(path) for path in made]


def start_in_pods(node: LoopNode) -> None:
    """Rank 0 finds the folders of pod A by variables, rank 1 those of pod B where they are."""
    folder, inbox = kubelet_makes(node, A)
    own = node.rank_environment(0, 2) | {"WARPWATCH_DIR": folder, "WARPWATCH_INBOX": inbox}
    node.start("rank0", _PROGRAM, own)
    inside = [*_UNSHARE, "sh", "-c", _MOUNT, "sh", *kubelet_makes(node, B), sys.executable]
    own = {"RANK": "1", "WORLD_SIZE": "2", "WARPWATCH_ATTACH_INTERVAL_S": "0.2"}
    container = node.start("rank1", ["-c", _RUN, *inside, *_PROGRAM], own)
    poll(lambda: container.poll() is not None or live_ranks(node) == {0, 1}, node.log("daemon"))
    if container.poll() == 125:
        pytest.skip("nothing can be mounted here")


def live_ranks(node: LoopNode) -> set[int]:
    ranks = node.get("ranks")
    return {rank["rank"] for rank in ranks if (rank["steps_total"] or 0) > 3}


def test_a_job_in_two_pods_is_captured_together_and_followed_over_a_restart(tmp_path):
    if subprocess.run([*_UNSHARE, "true"], capture_output=True).returncode:
        pytest.skip("no mount namespace can be made here")
    logs = tmp_path / "pod-logs"
    for uid in (A, B):
        (logs / f"team_train_{uid}").mkdir(parents=True)
    # A link in the rendezvous does not redirect files of the daemon.
    victim = tmp_path / "victim"
    (tmp_path / "run").mkdir()
    for name in (FILE, f"{FILE}.part"):
        (tmp_path / "run" / name).symlink_to(victim)
    with loop_node(tmp_path, attribution={"pod_logs": str(logs)}) as node:
        daemon = node.start_daemon()
        soft, hard = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        assert soft >= min(hard, 16_384) or hard == resource.RLIM_INFINITY
        start_in_pods(node)
        answer = node.http.post("/api/v1/captures", json={"job": "stepping", "kind": "stacks"})
        assert answer.status_code == 202, answer.text
        (capture,) = poll(lambda: [c for c in node.get("captures") if c["outcome"]], "its end")
        assert (capture["outcome"], capture["detail"]) == ("complete", "")
        stacks = Path(capture["folder"]) / "rank1.stacks.json"
        assert json.loads(stacks.read_text())["via"] == "helper"
        assert (Path(capture["folder"]) / "rank0.stacks.json").exists()
        for uid in (A, B):
            assert os.listdir(tmp_path / "inbox" / "pods" / uid) == []
        node.kill_daemon()
        node.start_daemon()
        poll(lambda: live_ranks(node) == {0, 1}, "the ranks after the restart")
        assert {rank["owner"] for rank in node.get("ranks")} == {"ns/team"}
        for rank, uid in ((0, A), (1, B)):
            assert node.metric("warpwatch_rank_info", rank=str(rank), pod_uid=uid) == 1
            assert len(os.listdir(node.run_dir / "pods" / uid / "ranks")) == 1
        positions = tmp_path / "captures" / FILE
        assert stat.S_IMODE(positions.lstat().st_mode) == 0o600
        assert not victim.exists()
