"""A pod that fills what it shares with others harms itself alone: attacks on a running daemon."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.ranks.pod_node import A, B
from tests.loop.node import LoopNode, loop_node, poll
from tests.loop.preloaded import ShiftedClock
from tests.loop.programs import STEPPING

MIB = 1 << 20
IN_2099 = 4.07e9
# The daemon with less patience: a second for what is ten minutes otherwise, or ten seconds.
IMPATIENT = """
import sys
from warpwatch_daemon.agent import app, capturing
from warpwatch_daemon.cli import main
from warpwatch_daemon.ranks import gone_pods, quotas
quotas.OWNER_FILES = 100
gone_pods.GONE_S, app.GONE_PODS_INTERVAL_S = 1.0, 0.2
capturing.DISK_INTERVAL_S = 1.0
sys.exit(main())
"""
SHARE = {"owner_bytes": 4 * MIB}


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[Path]:
    """The rendezvous, a tmpfs of 100 MiB."""
    path = tmp_path / "run"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=100m,mode=755", "tmpfs", str(path)]
    if os.getuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("a small tmpfs cannot be mounted here")
    yield path
    subprocess.run(["umount", "-l", str(path)], check=True)


def start_impatient(node: LoopNode) -> None:
    node.start("daemon", ["-c", IMPATIENT, "daemon", "--config", str(node.config)], {})


def mount_pod(node: LoopNode, uid: str) -> tuple[Path, Path]:
    """What the kubelet does before the pod starts: its folder and its inbox."""
    folders = node.run_dir / "pods" / uid, node.folder / "inbox" / "pods" / uid
    for folder in folders:
        poll(folder.parent.exists, "the daemon serves pods")
        folder.mkdir()
    return folders


def start_training(node: LoopNode, rank: int, uid: str, job: str) -> None:
    folder, inbox = node.run_dir / "pods" / uid, node.folder / "inbox" / "pods" / uid
    places = {"WARPWATCH_DIR": str(folder), "WARPWATCH_INBOX": str(inbox), "WARPWATCH_POD_UID": uid}
    program = STEPPING.replace("stepping", job)
    node.start_rank(rank, program, "-1", "0.01", world_size=1, **places)


def jobs(node: LoopNode) -> dict[str, int]:
    """How many steps each job has made."""
    return {rank["job"]: rank["steps_total"] for rank in node.get("ranks")}


def ask(node: LoopNode, job: str) -> tuple[int, Any]:
    answer = node.http.post("/api/v1/captures", json={"job": job, "kind": "stacks"})
    return answer.status_code, answer.json()


def outcome(node: LoopNode, job: str) -> str | None:
    (found,) = [c for c in node.get("captures") if c["request"]["job"] == job]
    said: str | None = found["outcome"]
    return said


def test_a_pod_that_fills_its_folder_and_inbox_is_not_captured_and_others_are(
    tmp_path: Path,
) -> None:
    with loop_node(tmp_path, rendezvous=SHARE) as node:
        start_impatient(node)
        for rank, (uid, job) in enumerate(((A, "hostile"), (B, "honest"))):
            mount_pod(node, uid)
            start_training(node, rank, uid, job)
        poll(lambda: len(jobs(node)) == 2, "both pods train")
        folder, inbox = node.run_dir / "pods" / A, tmp_path / "inbox" / "pods" / A
        (folder / "ranks" / "junk").write_bytes(bytes(65 * MIB))
        for number in range(8):
            (inbox / f"{number}.json").write_bytes(bytes(MIB))
            os.utime(inbox / f"{number}.json", (IN_2099, IN_2099))

        def refused() -> Any:
            answer = ask(node, "hostile")[1]
            return "error" in answer and answer["error"]["reason"] == "refused_quota"

        poll(refused, "the hostile pod is refused")
        left = sorted(path.name for path in inbox.glob("?.json"))
        # The newest stay, as far as the share reaches.
        assert left in (["4.json", "5.json", "6.json", "7.json"], ["5.json", "6.json", "7.json"])
        assert node.metric("warpwatch_rendezvous_rejected_total", reason="over_quota") == 1
        labels = {"kind": "stacks", "trigger": "manual", "outcome": "refused_quota"}
        assert (node.metric("warpwatch_captures_total", **labels) or 0) >= 1
        assert ask(node, "honest")[0] == 202
        poll(lambda: outcome(node, "honest") == "complete", "the honest pod is captured")


def test_rings_in_a_full_rendezvous_lose_nothing_and_new_ones_are_refused_with_the_reason(
    tmp_path: Path, memory: Path
) -> None:
    with loop_node(tmp_path) as node:
        start_impatient(node)
        mount_pod(node, A)
        mount_pod(node, B)
        start_training(node, 0, B, "before")
        poll(lambda: "before" in jobs(node), "a pod trains")
        with (node.run_dir / "pods" / A / "junk").open("wb", buffering=0) as junk:
            try:
                while True:
                    junk.write(bytes(1 << 16))
            except OSError as error:
                assert error.strerror == "No space left on device"
        start_training(node, 1, B, "after")
        refused = {"reason": "no_room"}
        poll(lambda: node.metric("warpwatch_rendezvous_rejected_total", **refused), "it is full")
        steps = jobs(node)["before"]
        poll(lambda: jobs(node)["before"] > steps + 50, "its steps are counted")
        assert jobs(node).keys() == {"before"}
        assert "is full: new ranks are not seen" in node.log("daemon")
        (node.run_dir / "pods" / A / "junk").unlink()
        poll(lambda: "after" in jobs(node), "there is room again")


def test_what_a_dead_pod_left_is_removed(tmp_path: Path) -> None:
    logs = tmp_path / "pod-logs"
    for name in (f"team_hostile_{A}", f"team_honest_{B}"):
        (logs / name).mkdir(parents=True)
    with loop_node(tmp_path, attribution={"pod_logs": str(logs)}) as node:
        start_impatient(node)
        left = [*mount_pod(node, A), *mount_pod(node, B)]
        start_training(node, 0, B, "honest")
        poll(lambda: "honest" in jobs(node), "a pod trains")
        assert [rank["owner"] for rank in node.get("ranks")] == ["ns/team"]
        for folder in left[:2]:
            (folder / "deep" / "er").mkdir(parents=True)
            (folder / "deep" / "er" / "junk").write_bytes(bytes(MIB))
        time.sleep(2.0)
        assert [folder.exists() for folder in left] == [True] * 4
        (logs / f"team_hostile_{A}").rmdir()
        poll(lambda: not (left[0].exists() or left[1].exists()), "both are removed")
        # The other one's process holds its lock, whatever the kubelet says.
        (logs / f"team_honest_{B}").rename(logs / "other_pod_f00dfeed-0000-4000-8000-000000000001")
        time.sleep(3.0)
        assert [folder.exists() for folder in left] == [False, False, True, True]
        assert os.listdir(node.run_dir / "pods") == [B]


def test_a_file_dated_2099_does_not_stay_in_the_inbox(tmp_path: Path) -> None:
    clock = ShiftedClock(tmp_path)
    with loop_node(tmp_path) as node:
        (tmp_path / "inbox" / "pods" / A).mkdir(parents=True)
        files = [tmp_path / "inbox" / "junk.json", tmp_path / "inbox" / "pods" / A / "junk.json"]
        for file in files:
            file.touch()
            os.utime(file, (IN_2099, IN_2099))
        # Two hours later.
        clock.set(7200)
        node.start_daemon(**clock.environment)
        poll(lambda: not any(file.exists() for file in files), "both are swept")
