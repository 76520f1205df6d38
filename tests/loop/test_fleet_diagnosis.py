"""A torchrun job over three nodes, a fleet and a bucket: one fault, one capture, one diagnosis."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.history.object_store import URL, Bucket, bucket
from tests.loop.cluster import LoopCluster, loop_cluster
from tests.loop.node import ROOT, poll
from tests.loop.over_nodes import NODES, capture_of, only_anomaly, trained
from tests.loop.trainings import ON_A_BUSY_MACHINE

pytestmark = [pytest.mark.loops, pytest.mark.torch]


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[Bucket]:
    with bucket(tmp_path / "buckets") as found:
        yield found


@pytest.fixture
def cluster(tmp_path: Path, s3: Bucket) -> Iterator[LoopCluster]:
    remote = {"url": URL}
    with loop_cluster(tmp_path, 3, detection=ON_A_BUSY_MACHINE, remote_store=remote) as cluster:
        cluster.start(**s3.environment)
        yield cluster


def test_a_straggler_over_three_nodes_is_captured_whole_and_diagnosed_as_one(cluster, s3):
    faults = trained(cluster, "slow")
    (faults / "fault").write_text("slower_forward 4")
    straggler = only_anomaly(cluster, "straggler")
    assert (straggler["rank"], straggler["node"]) == (4, "gpu-3")

    capture = capture_of(cluster, straggler)
    assert (capture["outcome"], capture["detail"]) == ("complete", ""), cluster.log()
    ranks = [(one["rank"], one["state"], one["node"]) for one in capture["ranks"]]
    assert ranks == [(rank, "written", NODES[rank]) for rank in range(6)]
    assert {one["first_step"] for one in capture["ranks"]} == {capture["start_step"]}
    found = capture["diagnosis"]
    # All of them sleep for most of a step, which is the host's own work, too.
    (late,) = [one for one in found["findings"] if one["kind"] == "straggler"]
    assert (late["rank"], late["node"]) == (4, "gpu-3")
    assert late["evidence"][0].startswith("rank 4 on gpu-3 keeps the others waiting")

    # Files of the fleet, and of an agent through it.
    address = f"/api/v1/captures/{capture['id']}"
    report = cluster.http.get(f"{address}/report.html")
    assert "rank 4 on gpu-3" in report.text
    trace = cluster.http.get(f"{address}/{capture['ranks'][4]['file']}")
    (on_disk,) = (
        path
        for path in (cluster.nodes[2].folder / "captures").rglob(capture["ranks"][4]["file"])
        if path.parent.name.startswith(capture["id"])
    )
    assert trace.content == on_disk.read_bytes()

    poll(lambda: cluster.http.get(address).json()["remote"], cluster.log)
    remote = cluster.http.get(address).json()["remote"]
    below = remote.removeprefix("s3://ours/")
    names = {one.removeprefix(below) for one in s3.objects() if one.startswith(below)}
    own = {"capture.json", "diagnosis.json", "manifest.json", "report.html"}
    own |= {f"rank{rank}.reduction.gz" for rank in range(6)}
    assert own <= names
    for rank, node in enumerate(NODES):
        assert f"nodes/{node}/rank{rank}.pt.trace.json.gz" in names
        assert f"nodes/{node}/manifest.json" in names
    told = subprocess.run(
        [sys.executable, "-m", "warpwatch_daemon", "diagnose", remote, "--json"],
        cwd=ROOT,
        env=os.environ | s3.environment,
        capture_output=True,
        check=False,
    )
    again = json.loads(told.stdout)
    keys = ("verdict", "summary", "findings")
    assert {key: again[key] for key in keys} == {key: found[key] for key in keys}


def test_a_stopped_rank_is_one_hang_with_the_stacks_of_the_five_that_wait(cluster):
    trained(cluster, "stopped")
    ranks = {one["rank"]: one for node in cluster.nodes for one in node.get("ranks")}
    os.kill(ranks[3]["pid"], signal.SIGSTOP)
    hang = only_anomaly(cluster, "hang")
    assert (hang["rank"], hang["node"]) == (3, "gpu-2")
    capture = capture_of(cluster, hang)
    assert capture["request"]["kind"] == "stacks"
    states = {one["rank"]: one for one in capture["ranks"]}
    assert [states[rank]["state"] for rank in (0, 1, 2, 4, 5)] == ["written"] * 5, capture
    said = capture["diagnosis"]["summary"]
    assert "rank 3 on gpu-2" in said and "stopped" in said, capture
    os.kill(ranks[3]["pid"], signal.SIGCONT)
