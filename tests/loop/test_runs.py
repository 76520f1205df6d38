"""Two runs of one program, the second with a slower part: what is said of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.daemon.history.object_store import URL, bucket
from tests.loop.node import LoopNode, loop_node, poll

# argv: seconds of a forward, and how many steps.
PROGRAM = """
import sys, time, warpwatch
forward_s, steps = float(sys.argv[1]), int(sys.argv[2])
monitor = warpwatch.attach(job="train")
for _ in range(steps):
    with monitor.step(tokens=100):
        with monitor.phase("forward"):
            time.sleep(forward_s)
        with monitor.phase("backward"):
            time.sleep(0.01)
"""


def warpwatch(node: LoopNode, *arguments: str) -> str:
    command = [sys.executable, "-m", "warpwatch_daemon", *arguments]
    environ = os.environ | {"WARPWATCH_DIR": str(node.run_dir)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(node: LoopNode, name: str, forward_s: float, steps: int) -> None:
    node.start_rank(0, PROGRAM, str(forward_s), str(steps), world_size=1, WARPWATCH_RUN=name)


def known(node: LoopNode, name: str) -> Any:
    return next((one for one in node.get("runs") if one["run"] == name), None)


def test_a_run_that_is_slower_than_the_one_before_is_found_and_its_phase_named(
    tmp_path: Path,
) -> None:
    config = {"remote_store": {"url": URL}, "triggers": {"recipes": {"run_regression": None}}}
    with bucket(tmp_path / "buckets") as s3, loop_node(tmp_path, **config) as node:
        node.start_daemon(wait=True, **s3.environment)
        run(node, "monday", 0.02, 200)
        poll(lambda: (known(node, "monday") or {}).get("end_time"), 90, node.log("rank0"))
        # What is known of it outlives the daemon.
        node.kill_daemon()
        node.start_daemon(wait=True, **s3.environment)
        run(node, "tuesday", 0.03, 100_000)

        def raised() -> Any:
            return [a for a in node.get("anomalies") if a["kind"] == "run_regression"]

        (anomaly,) = poll(raised, 90, node.log("daemon"))
        assert (anomaly["job"], anomaly["run"], anomaly["rank"]) == ("train", "tuesday", None)
        assert "longer than in the run before" in anomaly["summary"]
        assert anomaly["summary"].endswith("most of it in forward")
        compared = warpwatch(node, "runs", "compare", "monday", "train/tuesday", "--json")
        found = json.loads(compared)
        assert (found["grown"], found["differs"]) == ("forward", [])
        assert 1.2 < found["step_ratio"] < 1.6
        assert [line.split(":")[0] for line in warpwatch(node, "runs").splitlines()] == [
            "train/monday",
            "train/tuesday",
        ]
        owner = f"uid%2F{os.getuid()}"
        copies = [name for name in s3.objects() if "captures" not in name]
        assert copies == [f"gpus/runs/{owner}/train/monday.json"]
