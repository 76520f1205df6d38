"""Agents that lie, send garbage or flood, beside honest ones: who they are, and what they cost."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.fleet.hostile_agents import KINDS
from tests.loop.cluster import LoopCluster, loop_cluster
from tests.loop.node import ROOT, poll
from warpwatch_daemon.demo.processes import free_port

pytestmark = pytest.mark.hostile

FLOOD_S = 30.0
# A fleet without agents has some 75 MiB.
MAX_RSS = 300 * 2**20
# Steps of 50 ms without torch.
PROGRAM = """
import time, warpwatch
monitor = warpwatch.attach(job="train")
while True:
    with monitor.step():
        time.sleep(0.05)
"""


@pytest.fixture
def hostile() -> Iterator[dict[str, int]]:
    ports = {kind: free_port() for kind in KINDS}
    command = [sys.executable, "-m", "tests.fleet.hostile_agents", *map(str, ports.values())]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        yield ports
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def cluster(tmp_path: Path, hostile: dict[str, int]) -> Iterator[LoopCluster]:
    targets = [
        {"targets": [f"127.0.0.1:{port}"], "labels": {"owner": "uid/7"} if kind == "tenant" else {}}
        for kind, port in hostile.items()
    ]
    (tmp_path / "targets.json").write_text(json.dumps(targets))
    with loop_cluster(tmp_path, 2) as cluster:
        config = yaml.safe_load(cluster.config.read_text())
        config["fleet"]["targets_files"] = [str(tmp_path / "targets.json")]
        cluster.config.write_text(yaml.safe_dump(config))
        for node in cluster.nodes:
            node.start_daemon()
        yield cluster


def sources(cluster: LoopCluster) -> dict[str, Any]:
    return {one["name"]: one for one in cluster.http.get("/readyz").json()["sources"]}


def steps(cluster: LoopCluster) -> dict[int, int]:
    return {rank["rank"]: rank["steps_total"] for rank in cluster.get("ranks", job="train")}


def test_who_lies_or_floods_is_named_and_costs_the_others_nothing(cluster: LoopCluster) -> None:
    for number in range(4):
        node = cluster.nodes[number // 2]
        about = {"WARPWATCH_RUN": "first"}
        node.start_rank(number, PROGRAM, world_size=4, **about)
    cluster.start_fleet(agents=6)
    poll(lambda: len(steps(cluster)) == 4, cluster.log)
    fleet = psutil.Process(cluster.fleet.pid)
    before = steps(cluster)
    cluster.nodes[0].lets_pass(FLOOD_S)
    after, known = steps(cluster), sources(cluster)

    reasons = {name: source["reason"] for name, source in known.items()}
    assert "most of them: other_owner" in reasons["tenant"]
    assert "most of them: unreadable" in reasons["garbage"]
    flooding = next(name for name in reasons if name not in (*KINDS, "gpu-1", "gpu-2"))
    assert "s behind" in reasons[flooding]
    assert reasons["hour"] == "its clock is 3600 s ahead"
    metrics = cluster.http.get("/metrics").text
    for reason in ("other_owner", "unreadable"):
        assert f'warpwatch_fleet_refused_total{{reason="{reason}"}}' in metrics

    assert fleet.memory_info().rss < MAX_RSS
    assert [reasons[name] for name in ("gpu-1", "gpu-2")] == ["", ""]
    hosts = [rank["host"] for rank in cluster.get("ranks", job="train")]
    assert hosts == ["gpu-1", "gpu-1", "gpu-2", "gpu-2"]
    own = {r["rank"]: r["steps_total"] for node in cluster.nodes for r in node.get("ranks")}
    assert all(before[rank] < after[rank] <= own[rank] for rank in range(4))
    assert cluster.get("anomalies") == []
    (clocked,) = cluster.get("ranks", job="clocked")
    honest = cluster.get("ranks", job="train")[0]
    # The clock of its agent is an hour ahead.
    assert abs(clocked["last_step_time"] - honest["last_step_time"]) < 60
