"""`warpwatch fleet` as a process, over an agent that is one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.daemon.http.alert_node import alert, notification
from tests.loop.cluster import LoopCluster, loop_cluster
from tests.loop.node import poll


def run(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "fleet.yaml").write_text(text)
    command = [sys.executable, "-m", "warpwatch_daemon", "fleet", "--config"]
    return subprocess.run(
        [*command, str(tmp_path / "fleet.yaml")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("fleet: {targets: [gpu-1]}", "fleet.targets.0"),
        ("fleet: {target: []}", "did you mean 'targets'"),
        ("fleet: {agents: {token_file: /t}}", "in plain text"),
        ("fleet: {agents: {token_file: /no/t, allow_plain: true}}", "/no/t: No such file"),
        ("fleet: {agents: {ca_file: /no/ca.pem}}", "cannot use /no/ca.pem"),
        ("fleet: {shard: {index: 1}}", "there is no 1 of 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(tmp_path: Path, text: str, said: str) -> None:
    ended = run(tmp_path, text)
    assert ended.returncode == 2, ended.stderr
    assert said in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[LoopCluster]:
    with loop_cluster(tmp_path, 1) as cluster:
        cluster.start()
        yield cluster


def test_a_fleet_shows_its_agents_and_says_who_is_away(cluster: LoopCluster) -> None:
    assert cluster.up() == ["gpu-1"]
    page = cluster.http.get("/").text
    assert "gpu-1" in page
    assert httpx.get(f"http://127.0.0.1:{cluster.port}/api/v1/jobs").status_code == 401
    metrics = cluster.http.get("/metrics").text
    assert 'warpwatch_fleet_agents{state="up"} 1.0' in metrics
    assert 'warpwatch_fleet_agent_lag_seconds{node="gpu-1"}' in metrics
    (answer,) = cluster.http.post(
        "/api/v1/alertmanager", json=notification(alert(training_job="train", capture="torch"))
    ).json()["alerts"]
    assert (answer["outcome"], answer["detail"][:14]) == ("no_rank", "no running ran")
    # What agents alone answer is not there.
    for path in ("leases", "captures/prepare"):
        assert cluster.http.post(f"/api/v1/{path}", json={}).status_code in (404, 405)
    assert "/api/v1/records" not in cluster.http.get("/openapi.json").json()["paths"]
    (node,) = cluster.nodes
    node.kill_daemon()

    def away() -> str:
        (source,) = cluster.http.get("/readyz").json()["sources"]
        return str(source["reason"])

    assert "Error" in poll(away, cluster.log())
    node.start_daemon()
    assert poll(cluster.up, cluster.log()) == ["gpu-1"]
    assert cluster.fleet is not None
    cluster.fleet.terminate()
    assert cluster.fleet.wait(30) == 0
